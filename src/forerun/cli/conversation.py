"""A conversation with a model: its turns, their timings, and what is dropped when the context is full.

The context is finite: when the next message no longer fits, the oldest exchanges are dropped, and a line says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.show import in_tokens
from forerun.cli.write import write_text
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.api.llm import LLM
    from forerun.api.prompts import Message
    from forerun.cli.flags import Settings
    from forerun.cli.show import Screen
    from forerun.cli.write import Written

_FORMAT = "forerun-chat-1"


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant; the system message comes before them and is not one of them."""

    llm: LLM
    settings: Settings
    screen: Screen
    system: str | None = None
    drafter: str | None = None  # None = the engine's own
    turns: list[Message] = field(default_factory=list)
    done: list[Written] = field(default_factory=list)

    def answer(self, message: str) -> None:
        """Write the next turn; an answer that is stopped counts as far as it came."""
        before = self.turns
        self.turns = [*before, {"role": "user", "content": message}]
        try:
            self._make_room()
            written = write_text(
                self.llm,
                self.prompt(),
                self.settings.sampling,
                drafter=self.drafter,
                show=self.screen.write,
                visible=self.screen.is_terminal,
            )
        except BaseException:
            self.screen.flush()
            self.turns = before
            raise
        self.screen.close(written)
        if written.tokens:
            self.done.append(written)
        if written.text:
            self.turns.append({"role": "assistant", "content": written.text})
        else:
            self.turns = before  # a question without an answer would come before the next one

    def prompt(self) -> list[Message]:
        from forerun.api.prompts import as_messages

        return as_messages(self.turns, self.system)

    def undo(self) -> bool:
        """Take back the last message and its answer; False where there is none."""
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if asked:
            self.turns = self.turns[: asked[-1]]
        return bool(asked)

    def statistics(self) -> str:
        """Everything that was answered, prompts and answers apart."""
        done, rounds = self.done, sum(written.rounds for written in self.done)
        if not rounds:
            return "nothing was answered yet"
        tokens, prompts = sum(one.tokens for one in done), sum(one.prompt_tokens for one in done)
        later = sum(one.tokens - one.first_tokens for one in done)
        prompt_seconds, seconds = (
            sum(one.prompt_seconds for one in done),
            sum(one.text_seconds for one in done),
        )
        context = len(self.llm.encode(self.prompt())) if self.turns else 0
        return (
            f"answers {len(done)}"
            f" · prompts {in_tokens(prompts, prompts / prompt_seconds if prompt_seconds else None)}"
            f" · text {in_tokens(tokens, later / seconds if later and seconds else None)}"
            f" · {tokens / rounds:.2f} tokens per round · context {context} of {self.llm.engine.max_length}"
        )

    def save(self, file: Path) -> None:
        """Write the conversation as JSON; any other existing file is kept."""
        if file.exists() and not (file.is_file() and _is_chat(file)):  # a device may never end
            raise InvalidInput(f"{str(file)!r} exists and is no saved conversation; choose another name")
        document = {
            "format": _FORMAT,
            "model": self.settings.model,
            "system": self.system,
            "messages": self.turns,
        }
        try:
            file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write {str(file)!r}: {error.strerror}; choose another name") from None

    def load(self, file: Path) -> None:
        """Go on with a saved conversation, or with a JSON list of messages; on an error nothing changes."""
        found = _read(file)
        messages = found.get("messages") if isinstance(found, dict) else found
        turns = _checked(messages, file)
        system = found.get("system") if isinstance(found, dict) else None
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"]
        if not isinstance(system, str | None) or any(turn["role"] == "system" for turn in turns):
            raise InvalidInput(f"{str(file)!r} has a system message that is not in front; put it there")
        if turns and turns[-1]["role"] == "user":
            turns.pop()  # it has no answer
        self.turns, self.system = list(turns), system

    def _make_room(self) -> None:
        """Drop the oldest exchanges until there is room to answer: what is asked for, or a quarter.

        Raises where the last message alone leaves none.
        """
        limit, turns = self.llm.engine.max_length, self.turns
        room = min(self.settings.sampling.max_tokens, limit // 4)
        while len(self.turns) > 1 and len(self.llm.encode(self.prompt())) + room > limit:
            self.turns = self.turns[2:]
        if (needed := len(self.llm.encode(self.prompt()))) >= limit:
            raise InvalidInput(
                f"the message takes {needed} tokens and the context has {limit}: send a shorter one, or a part of it"
            )
        dropped = (len(turns) - len(self.turns)) // 2
        if dropped:
            what = "exchange was" if dropped == 1 else f"{dropped} exchanges were"
            self.screen.say(f"the context of {limit} tokens is full: the oldest {what} dropped")


def _read(file: Path) -> Any:
    if file.exists() and not file.is_file() and not file.is_dir():  # a device or a pipe may never end
        raise InvalidInput(f"{str(file)!r} is no file; /load takes what /save wrote")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {str(file)!r}: {error.strerror}; check the path") from None
    except ValueError:
        raise InvalidInput(f"{str(file)!r} is not JSON; /load takes what /save wrote") from None


def _is_chat(file: Path) -> bool:
    try:
        found = _read(file)
    except InvalidInput:
        return False
    return isinstance(found, dict) and found.get("format") == _FORMAT


def _checked(messages: Any, file: Path) -> list[dict[str, str]]:
    fine = isinstance(messages, Sequence) and all(
        isinstance(turn, dict)
        and turn.get("role") in ("system", "user", "assistant")
        and isinstance(turn.get("content"), str)
        for turn in messages
    )
    if not fine:
        raise InvalidInput(
            f"{str(file)!r} holds no messages with role and content; /load takes what /save wrote"
        )
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]
