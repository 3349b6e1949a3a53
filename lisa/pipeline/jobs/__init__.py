"""What `lisa pipeline NAME` does, as functions of a Spark session."""
