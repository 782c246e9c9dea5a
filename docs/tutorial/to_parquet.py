"""Moves what is in the topic `orders` into a table of Parquet files, each message once, and ends.

    python to_parquet.py

Kill it at any moment and run it again: it goes on where it was. The table is in lake/orders, what Spark needs to
remember in lake/checkpoint.
"""

import os

from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.appName("orders to Parquet")
    .master("local[*]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .getOrCreate()
)
messages = (
    spark.readStream.format("popgate")
    .option("url", os.environ.get("POPGATE_URL", "http://127.0.0.1:8080"))
    .option("topic", "orders")
    .option("group", "lake")
    .load()
)
query = (
    messages.selectExpr(
        "body", "headers", "queue", "delivery_count", "first_delivered_at", "sha2(body, 256) AS checksum"
    )
    .writeStream.format("parquet")
    .option("path", "lake/orders")
    .option("checkpointLocation", "lake/checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

table = spark.read.parquet("lake/orders")
table.select("checksum").toPandas().to_csv("in-the-lake.txt", header=False, index=False)
print(f"{table.count()} messages are in lake/orders")
