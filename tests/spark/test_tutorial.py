"""Runs the documentation's Spark examples unchanged."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from acceptance.readme import PROJECT, scenario
from acceptance.terminal import ServerBlock, Substitution, Terminal, checkout, reader_environment
from spark.conftest import SparkTopic
from support.processes import PortBlock

PAGE = PROJECT / "docs" / "tutorial" / "spark.md"
MESSAGES, MESSAGES_SHORT = 2_000, 300
BLOCK_SECONDS = 150
ELSEWHERE = """
import pickle, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("popgate"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Missing())
source, reader, partitions = pickle.loads(sys.stdin.buffer.read())
print(source.name(), [bytes(body.as_py()) for one in partitions for rows in reader.read(one) for body in rows["body"]])
"""


def test_rabbitmq_to_parquet_as_the_tutorial_tells_it(tmp_path: Path, amqp_url: str, java: None) -> None:
    ports = PortBlock()
    (port,) = ports.ports
    counts = {f"{times * MESSAGES}": f"{times * MESSAGES_SHORT}" for times in (1, 2)}
    substitution = Substitution(port=port, amqp_url=amqp_url, counts=counts)
    environment = {**reader_environment(port, tmp_path / "data"), "SPARK_LOCAL_IP": "127.0.0.1"}
    with ExitStack() as stack:
        terminal = stack.enter_context(Terminal(checkout(tmp_path), substitution, environment))
        for block in scenario("parquet", PAGE):
            if block.keeps_running:
                stack.enter_context(ServerBlock(tmp_path / "serve", block, port, substitution, environment))
            elif "to_parquet" in block.text and block.output:
                printed = terminal.paste(
                    type(block)(
                        scenario=block.scenario,
                        language=block.language,
                        text=block.text,
                        keeps_running=False,
                        output=substitution.apply(block.output),
                    ),
                    timeout_seconds=BLOCK_SECONDS,
                )
                assert "Traceback" not in printed
            else:
                terminal.paste(block)


def test_code_that_is_sent_along_works_where_popgate_is_not_installed(topic: SparkTopic) -> None:
    """The page's use of --py-files, in a separate process, because it changes how the process pickles."""
    topic.publish("one")
    (page,) = (PROJECT / "docs").glob("spark.md")
    recipe = page.read_text().split("```python\nfrom pyspark import cloudpickle\n")[1].split("spark.dataSource")[0]
    program = (
        f"from pyspark import cloudpickle\n{recipe}\n"
        f"import sys\nfrom popgate_spark import PopgateDataSource\n"
        f"source = PopgateDataSource({topic.options!r})\n"
        "reader = source.reader(source.schema())\n"
        "sys.stdout.buffer.write(cloudpickle.dumps((PopgateDataSource, reader, reader.partitions())))\n"
    )
    sent = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60).stdout
    there = subprocess.run([sys.executable, "-c", ELSEWHERE], input=sent, capture_output=True, check=False, timeout=60)
    assert there.stdout.decode().strip() == "popgate [b'one']", there.stderr.decode()
