"""Records, errors, storage keys, encoding and time, for all other packages of batchinfer. Core imports none of them."""
