"""`batchinfer convert`: turn checkpoints and models into other formats. Each conversion is one module."""
