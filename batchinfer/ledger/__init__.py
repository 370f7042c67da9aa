"""What a run holds on storage and the rules by which it changes: jobs, claims, checkpoints, outputs, markers.

Synchronous: each function makes its requests in the thread of its caller. Only `worker/` knows background threads.
"""
