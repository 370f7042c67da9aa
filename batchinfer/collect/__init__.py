"""`batchinfer collect`: a run's verified answers as parquet, JSON Lines, CSV or a data set on the Hub."""
