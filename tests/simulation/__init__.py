"""The real worker on simulated time, storage, engine and failures: everything that happens follows from one seed.

    python -m simulation --seeds 1000            (with tests/ on the path; `make simulate SEEDS=1000` does it)
    python -m simulation --seed 42               replays one seed and prints all that happened

* `scheduler`: virtual time, and processes whose greenlets stand in for threads; kill, freeze.
* `storage`: a bucket's server in memory under `batchinfer.storage.bucket.BucketStore`'s own verbs, with faults.
* `machine`: what `worker.start.run_worker` gets as its Environment: clock, background, engine, store.
* `oracle`: what must hold after every write, and at the end.
* `plot`: what a seed stands for: job, settings, weather, engine.
* `scenario`: a seed's course from its first start to a finished run.
* `files`: scratch folders.
* `injections`: mishaps from outside of the workers, each kind in a share of the seeds (`--inject NAME`: in all).
* `scenes`: scripted scenes for the defects that seeds meet too seldom.
* `scale`: very many workers, without mishaps to storage: how long a run takes, and what the bucket has to bear.
* `defects`: deliberate mistakes in the worker and in `clean`, each of which the simulation must catch.
"""
