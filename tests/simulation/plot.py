"""What kind of run a seed is: everything that is drawn before it begins, its job among it."""

import json
import random

from batchinfer.worker.media_fetching import NUM_THREADS
from batchinfer.worker.worker_config import Limits

from .machine import BROKEN, FLAKY, POISON, EngineTraits
from .oracle import Row
from .storage import Weather


class Plot:
    """The draws of one seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(f"plot {seed}")
        self.is_calm = chance.random() < 0.1
        self.has_retry = chance.random() < 0.2
        self.has_other_config = chance.random() < 0.12
        self.has_own_manifests = chance.random() < 0.2
        self.compression = chance.choice(["none"] * 6 + ["zstd"])
        self.temperature = chance.choice([0.0, 0.5, 0.5, 0.5])  # at 0, rows have no seeds
        self.run_seed = chance.choice([None, 0, 1, 2, 3])
        self.lease_seconds = chance.choice([3.0, 6.0, 12.0])
        self.checkpoint_seconds = chance.choice([0.5, 1.5, 4.0, 1000.0])
        self.grace_seconds = chance.choice([0.5, 2.0, 5.0])
        self.mishaps_seconds = chance.choice([15.0, 30.0, 60.0])
        self.mishap_gap = chance.choice([1.0, 3.0, 8.0])
        # 0: an idle worker looks at one chunk after the other, as at the blocks of a large job.
        self.most_neighbours = chance.choice([1, 1, 1000])
        self.most_sampled = chance.choice([1, 64])
        self.fresh_seconds = chance.choice([1.0, 10.0, 60.0])
        # Longest time until a row's image is fetched; None for a run without images.
        self.image_seconds = chance.choice([0.01, 0.5, 3.0, *[None] * 9])
        self.most_fetched = chance.choice([1, 2, NUM_THREADS])
        self.limits = Limits(
            max_open_chunks=chance.choice([1, 2, 64]),
            max_openings=chance.choice([1, 4]),
            max_publishing=chance.choice([1, 2, 7]),
            max_build_rows=chance.choice([1, 5, 512]),
            storage_attempts=chance.choice([1, 2, 4]),
            storage_retry_seconds=chance.choice([0.2, 1.0]),
        )
        self.weather = self._draw_weather()
        self.engine = EngineTraits(
            max_in_flight=chance.choice([1, 2, 4, 8, 16]),
            step_seconds=chance.choice([0.05, 0.2]),
            row_seconds=chance.choice([0.1, 0.5, 2.0]),
            load_seconds=chance.choice([0.2, 1.0, 4.0]),
            dies=self._maybe(0.2, 0.05),
            fails_to_load=self._maybe(0.1, 0.3),
            restarts=chance.choice([0.0, 0.0, 0.7]),
            kills_at_once=chance.random() < 0.4,
            varies=chance.random() < 0.5,
        )
        num_chunks = chance.randint(2, 8)
        self.num_workers = min(chance.randint(2, 5), num_chunks)
        self.rows = self._draw_rows(num_chunks, chance.randint(1, 12))
        self.limit = None if chance.random() < 0.85 else chance.randint(1, sum(map(len, self.rows)))

    def _maybe(self, share: float, value: float) -> float:
        chance = self.chance
        return value * chance.random() if not self.is_calm and chance.random() < share else 0.0

    def _draw_weather(self) -> Weather:
        chance, lease = self.chance, self.lease_seconds
        start = chance.random() * self.mishaps_seconds
        outage = self._maybe(0.2, 3 * lease)
        return Weather(
            latency_seconds=chance.choice([0.005, 0.03, 0.2]),
            refused=self._maybe(0.5, 0.2),
            lost=self._maybe(0.5, 0.2),
            late=self._maybe(0.4, 0.15),
            late_seconds=lease * chance.choice([0.3, 2.0, 6.0]),
            slow=self._maybe(0.4, 0.1),
            slow_seconds=lease * 1.5,
            partly=self._maybe(0.3, 0.5),
            dies_before=self._maybe(0.3, 0.05),
            dies_after=self._maybe(0.3, 0.05),
            outages=((start, start + outage),),
        )

    def _draw_rows(self, num_chunks: int, per_chunk: int) -> list[list[Row]]:
        """Rows by chunk; the last one may have fewer."""
        chance = self.chance
        num_rows = num_chunks * per_chunk - chance.randrange(per_chunk)
        num_poison = chance.choice([1, 1, 2, 3, *[0] * 14])
        self.poison = set(chance.choices(range(num_rows), k=num_poison))
        rows = [self._draw_row(index) for index in range(num_rows)]
        return [rows[first : first + per_chunk] for first in range(0, num_rows, per_chunk)]

    def _draw_row(self, index: int) -> Row:
        draw = self.chance.random()
        prompt = f"{FLAKY} {index}" if draw < 0.15 else f"say {index}"
        codes = frozenset[str]()
        if index in self.poison:
            prompt = f"{POISON} row"
        elif draw < 0.03:
            return Row(b'{"prompt": "broken', "", frozenset({"invalid_json"}))
        elif draw < 0.05:
            return Row(b"", "", frozenset({"invalid_json"}))
        elif draw < 0.08:
            return Row(b'{"other": 1}', "", frozenset({"missing_column"}))
        elif draw < 0.1:
            prompt, codes = "", frozenset({"invalid_column"})
        image, draw = None, self.chance.random()
        if self.image_seconds is not None and draw < 0.6:
            image = f"http://images/{prompt.replace(' ', '-')}"
            if draw < 0.05 and prompt:
                image += BROKEN
                codes = frozenset({"media_unavailable"})
        return Row(line_of(index, prompt, image=image), prompt, codes, image or "")


def line_of(index: int, prompt: str, **columns: object) -> bytes:
    """The line of a row in a chunk."""
    values = {"prompt": prompt, "_row": index, "_id": str(index), **columns}
    return json.dumps(values).encode()
