"""`batchinfer check`: find out before paying whether a run will work, and what it will take."""
