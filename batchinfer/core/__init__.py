"""What every room may use: records, errors, keys, bytes, time. No room is known here."""
