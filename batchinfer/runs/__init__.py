"""Commands that look after a run: status, report, verify, clean, stop."""
