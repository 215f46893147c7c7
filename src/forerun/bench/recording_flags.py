"""The flags of benchmarks that `record` texts of a model first and then work on that file."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_recording_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--suite", default="builtin")
    parser.add_argument("--limit", type=int, help="prompts per task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
