"""The README's blocks that are marked for testing: the tests run exactly what a reader pastes.

A block is marked by a comment on the line before it, which a reader of the page does not see:

    <!-- test: tutorial -->               the block belongs to the scenario `tutorial`
    <!-- test: tutorial, keeps running -->   it does not end by itself: a server
    <!-- output -->                       what the block before prints; `...` stands for anything

This module parses; `terminal` runs the blocks.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
README = PROJECT / "README.md"
KEEPS_RUNNING = "keeps running"
TUTORIAL_DATA = "--data-dir /tmp/popgate-tutorial"
"""A test uses another folder, named in its environment."""

_BLOCK = re.compile(
    r"^<!-- (?:test: (?P<scenario>[\w-]+)(?:, (?P<how>[\w ]+))?|(?P<output>output)) -->\n"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block. `output` None: the README shows no output."""

    scenario: str
    language: str
    text: str
    keeps_running: bool
    output: str | None = None

    def prints(self, printed: str) -> bool:
        """Tell whether this output matches the README's."""
        if self.output is None:
            return True
        pattern = ".*".join(re.escape(part) for part in self.output.strip().split("..."))
        return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def scenario(name: str, page: Path = README) -> list[Block]:
    """Return the blocks of one scenario, in the order of the page. Raises: LookupError if there are none."""
    blocks: list[Block] = []
    for found in _BLOCK.finditer(page.read_text()):
        if found["output"] is None:
            blocks.append(
                Block(
                    scenario=found["scenario"],
                    language=found["language"],
                    text=found["text"].replace(TUTORIAL_DATA, '--data-dir "$POPGATE_DATA_DIR"'),
                    keeps_running=found["how"] == KEEPS_RUNNING,
                )
            )
        else:
            last = blocks[-1]
            blocks[-1] = Block(
                scenario=last.scenario,
                language=last.language,
                text=last.text,
                keeps_running=last.keeps_running,
                output=found["text"],
            )
    wanted = [block for block in blocks if block.scenario == name]
    if not wanted:
        raise LookupError(f"{page.name} has no block marked <!-- test: {name} -->")
    return wanted
