"""popgate on Spark: a streaming source, a sink, and the jobs that read the delivery journal."""
