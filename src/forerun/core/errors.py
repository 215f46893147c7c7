"""The errors that Forerun raises for its users, as one class tree.

    ForerunError
    ├── InvalidInput            a value the caller gave cannot be used
    │   ├── UnknownName         no drafter, verifier, controller or model of that name
    │   ├── PromptTooLong       the prompt leaves no room in the context
    │   ├── VocabularyMismatch  drafter and target have different vocabularies
    │   └── CannotSample        every token is ruled out, or a processor failed: nothing can follow
    │       └── GrammarFailed   what the answer must match cannot be computed any further
    ├── ModelError              a checkpoint cannot be found, read or run
    │   ├── ModelNotFound
    │   ├── DamagedFile         a file is truncated, inconsistent or not what its name says
    │   └── UnsupportedModel    a family or layout that neither our decoder nor transformers can run here
    ├── OutOfMemory             a model or its KV cache does not fit into the memory there is, or may be used
    ├── Overloaded              more requests at once than were allowed
    └── MissingDependency       an optional library is needed and absent

Each message is one line: what was given, what the limit is, and what to do next. The command line prints
it as it is and exits with code 2.
"""


class ForerunError(Exception):
    """Base of all errors that a user can cause or fix."""


class InvalidInput(ForerunError, ValueError):
    """A value the caller gave cannot be used."""


class UnknownName(InvalidInput):
    """A name that no registry knows."""


class PromptTooLong(InvalidInput):
    """The prompt leaves no room in the context."""


class VocabularyMismatch(InvalidInput):
    """Drafter and target do not share a vocabulary."""


class CannotSample(InvalidInput):
    """The bans or processors of a request leave no token that can follow."""


class GrammarFailed(CannotSample):
    """What an answer must match cannot be computed any further: its text ends, with this as the reason."""


class ModelError(ForerunError):
    """A checkpoint cannot be found, read or run."""


class ModelNotFound(ModelError):
    """No checkpoint under that name or path."""


class DamagedFile(ModelError):
    """A file is truncated, inconsistent or not what its name says."""


class UnsupportedModel(ModelError):
    """A family or layout that cannot be run here."""


class OutOfMemory(ForerunError, MemoryError):
    """More memory is needed than there is, or than a limit (ulimit -v) allows."""


class Overloaded(ForerunError):
    """More requests at once than were allowed."""


class MissingDependency(ForerunError, ImportError):
    """An optional library is needed and absent."""


def brief(reason: object, longest: int = 200) -> str:
    """Another library's message on one line, shortened so that it fits into a message of ours."""
    words = " ".join(str(reason).encode("utf-8", "replace").decode("utf-8").split())
    return words if len(words) <= longest else words[: longest - 3] + "..."
