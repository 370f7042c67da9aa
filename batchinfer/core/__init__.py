"""The ground floor, for every room: records, errors, keys, encoding and time. It imports no room."""
