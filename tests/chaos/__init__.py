"""Real worker processes over a real S3 API, killed and frozen at random, with replies lost on the way."""
