"""`popgate serve` that counts what its interpreter executes: bytecodes, and calls of functions in C.

python executed.py serve ...

Each SIGUSR1 writes the counts so far as JSON to the file that the environment variable ``EXECUTED`` names: a list of
``[file, line, function, bytecodes, calls into C]``. Counting begins with the first signal.
"""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from popgate.cli import main

TraceFunction = Callable[[FrameType, str, Any], Any]

_bytecodes: Counter[CodeType] = Counter()
_calls: Counter[CodeType] = Counter()
_counting = threading.Event()


def _trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
    if event == "opcode":
        _bytecodes[frame.f_code] += 1
    elif event == "call":
        if not _counting.is_set():
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
    return _trace


def _profile(frame: FrameType, event: str, _: object) -> None:
    if event == "c_call" and _counting.is_set():
        _calls[frame.f_code] += 1


def _report(*_: object) -> None:
    _counting.clear()
    file = Path(os.environ["EXECUTED"])
    new = file.with_suffix(".new")
    codes = {*_bytecodes, *_calls}
    rows = [(one.co_filename, one.co_firstlineno, one.co_qualname, _bytecodes[one], _calls[one]) for one in codes]
    new.write_text(json.dumps(rows))
    new.replace(file)
    _counting.set()
    sys.settrace(_trace)
    sys.setprofile(_profile)


if __name__ == "__main__":
    threading.settrace(_trace)
    threading.setprofile(_profile)
    signal.signal(signal.SIGUSR1, _report)
    main()
