#!/usr/bin/env bash
# Submit workers to SkyPilot from this checkout: scripts/launch_workers.sh JOB --run URL --workers 16 --model NAME …
# It is `batchinfer launch --on skypilot` with the same options; `batchinfer launch --help` and docs/launch.md have all.
cd "$(dirname "${BASH_SOURCE[0]}")/.." && exec batchinfer launch --on skypilot "$@"
