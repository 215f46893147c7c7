"""Command line of `python -m forerun.train`: training and data making, with only torch and transformers installed.

    python -m forerun.train eagle3 --target smollm2 --data DIR --out DIR --steps 4000
    python -m forerun.train data --target smollm2 --out DIR --own-prompts 20000
    python -m forerun.train refresh --target smollm2 --data RECORDED --out VERSIONS

The flags are the fields of the option classes; progress is logged. `forerun train` and `forerun data make` do the
same, with progress bars.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from time import monotonic
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from forerun.core.errors import ForerunError
from forerun.train.data.folder import require_recordings, require_texts
from forerun.train.options import METHODS, DataOptions, TrainOptions, in_tuple

if TYPE_CHECKING:
    from forerun.train.loop import Progress

log = logging.getLogger("forerun.train")
SAY_EVERY = 5.0  # seconds
INTERRUPTED = 130  # exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 on success."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(prog="python -m forerun.train", description=__doc__.split("\n")[0])
    parser.add_argument("method", choices=[*METHODS, "data", "refresh"])
    known, _ = parser.parse_known_args(arguments)
    owner: type[Any] = DataOptions if known.method == "data" else TrainOptions
    for field in fields(owner):
        if field.name != "method":
            _add_flag(parser, field, get_type_hints(owner)[field.name])
    values = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    try:
        _run({k: in_tuple(owner, k, v) if isinstance(v, list) else v for k, v in values.items()})
    except ForerunError as error:
        log.error("%s", " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _run(values: Mapping[str, Any]) -> None:
    spoken = [monotonic()]

    def due(force: bool = False) -> bool:
        if force or monotonic() - spoken[0] >= SAY_EVERY:
            spoken[0] = monotonic()
            return True
        return False

    if values["method"] == "data":
        from forerun.train.data.make import DataProgress, make_data

        def say_data(at: DataProgress) -> None:
            if due(at.done == at.total):
                log.info("%s %d/%d, %d tokens", at.stage, at.done, at.total, at.tokens)

        make_data(DataOptions(**{k: v for k, v in values.items() if k != "method"}), say_data, log.info)
        return

    def say(at: Progress) -> None:
        if due(at.tokens_per_round is not None):
            shown = "" if at.tokens_per_round is None else f", {at.tokens_per_round:.3f} tokens per round"
            tree = "" if at.tree_tokens_per_round is None else f" (tree {at.tree_tokens_per_round:.3f})"
            head = f"step {at.step}/{at.steps}, loss {at.loss:.4f}, acceptance {at.acceptance:.3f}"
            walked = at.walked_tokens_per_round
            other = "" if walked is None else f", {walked:.3f} through other texts"
            log.info("%s, %.0f tokens/s%s%s%s", head, at.tokens_per_second, shown, tree, other)

    if values["method"] == "refresh":
        require_recordings(values["data"])
        from forerun.train.refresh import refresh

        log.info("%s", refresh({k: v for k, v in values.items() if k != "method"}, say, log.info))
        return
    options = TrainOptions(**values)
    require_texts(options)
    from forerun.train.run import train

    train(options, say, log.info)


def _add_flag(parser: argparse.ArgumentParser, field: Field[Any], hint: Any) -> None:
    name = "--" + field.name.replace("_", "-")
    required = field.default is MISSING
    if hint is bool or bool in get_args(hint):
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
    elif get_origin(hint) is tuple:
        parser.add_argument(name, action="append")  # `in_tuple` reads them
    else:
        kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in (int, float, str)]
        choices = [choice for choice in get_args(hint) if isinstance(choice, str)] or None
        parser.add_argument(name, type=kinds[0] if kinds else str, choices=choices, required=required)
