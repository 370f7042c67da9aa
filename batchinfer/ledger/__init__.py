"""What a run holds on storage and the rules by which it changes: jobs, claims, checkpoints, outputs, markers.

The functions here are synchronous: each makes its storage requests before it returns. Background threads that call
these functions are started in `worker/`.
"""
