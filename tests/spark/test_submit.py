"""Submits to a cluster whose machines have no popgate, as docs/spark.md describes."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

from spark.conftest import SparkTopic
from support import spark

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"
MASTER = "local-cluster[1,1,1024]"
SUBMIT_SECONDS = 180
JOB = """
import sys
from pyspark.sql import SparkSession

options = dict(option.split("=", 1) for option in sys.argv[1:])
session = SparkSession.builder.getOrCreate()
session.read.format("popgate").options(**options).load().write.parquet("out")
print("rows:", session.read.parquet("out").count())
print("python:", session.sparkContext.parallelize([0], 1).map(lambda _: __import__("os").environ["FROM"]).collect())
"""


def documented_submit() -> list[str]:
    """The words of the submit command, with its environment variables."""
    text = DOCUMENT.read_text()
    _, _, command = text.partition("PYSPARK_PYTHON=./environment")
    command, _, _ = command.partition("```")
    return shlex.split("PYSPARK_PYTHON=./environment" + command.replace("\\\n", " "))


def make_environment(folder: Path) -> None:
    """Replaces a virtual environment of half a gigabyte with programs that start those of the tests, and record their
    location."""
    programs = folder / "environment" / "bin"
    programs.mkdir(parents=True)
    for name, program in (
        ("python", f'FROM=$(cd "$(dirname "$0")/.." && pwd) exec {sys.executable} "$@"'),
        ("spark-submit", f'exec {Path(sys.executable).with_name("spark-submit")} "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{program}\n")
        (programs / name).chmod(0o755)
    with tarfile.open(folder / "popgate.tar.gz", "w:gz") as archive:
        archive.add(folder / "environment", arcname=".")


def test_a_job_is_submitted_with_its_python_as_an_archive(topic: SparkTopic, tmp_path: Path, java: None) -> None:
    topic.publish_numbered(100)
    make_environment(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    words = documented_submit()
    words[words.index("spark://...")] = MASTER
    job = words.pop()
    for name, value in spark.settings(tmp_path / "spark").items():
        words += ["--conf", f"{name}={value}"]
    words += [job, *(f"{name}={value}" for name, value in topic.options.items())]
    own = {**os.environ, **spark.environment()}
    ended = subprocess.run(
        ["env", *words],
        cwd=tmp_path,
        env={name: value for name, value in own.items() if not name.startswith("PYSPARK_")},
        capture_output=True,
        text=True,
        timeout=SUBMIT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3_000:]
    rows, python = ended.stdout.splitlines()[-2:]
    assert rows == "rows: 100"
    assert "/environment'" in python
    assert str(tmp_path / "environment") not in python, "the executor has its own, from the archive"
