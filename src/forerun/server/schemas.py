"""What requests may hold: the OpenAI API's fields, vLLM's additions, and `speculative`, which is ours.

Ranges are checked by SamplingParams, which says what is wrong in one line; here are names and types, and the ranges for
whoever reads the OpenAPI schema. A name that is unknown is refused with the nearest one that is known, because a
misspelt option that is ignored costs a day. What clients of the OpenAI API and of vLLM send by themselves is taken
where it changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from forerun.core.checks import unknown
from forerun.core.params import LARGEST_BIAS, LARGEST_PENALTY
from forerun.core.request import MOST_URGENT

# fields of the OpenAI API that change nothing here
_IGNORED = ("user", "metadata", "store", "service_tier", "prompt_cache_key",
            "prompt_cache_retention", "safety_identifier", "verbosity",
            "include_obfuscation", "request_id", "guided_decoding_backend")  # fmt: skip
# fields of other servers that clients send with the value that changes nothing: only that value is taken
_NEUTRAL: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "return_tokens_as_token_ids": False,
    "truncate_prompt_tokens": None, "prompt_logprobs": None, "functions": None, "function_call": None,
    "modalities": ["text"], "guided_whitespace_pattern": None,
}  # fmt: skip


MOST_LOGPROBS = 64  # as SamplingParams has it: tokens beside the one written
MOST_PROMPT_LOGPROBS = 20  # and of the tokens of a prompt
MOST_STOP = 8192  # characters of all stop strings: each new token is compared with all of them
LONGEST_NAME = 1024  # characters of a name that is neither read nor written, but kept and compared


class FieldError(ValueError):
    """A field that cannot be taken, by its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _refuse_flag(value: Any) -> Any:
    """Truth values are numbers to Python; in a request they are mistakes."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


def _check_stop(stop: str | list[str]) -> str | list[str]:
    size = sum(map(len, stop))
    if size > MOST_STOP:
        raise ValueError(f"the stop strings have {size} characters in all; at most {MOST_STOP} are taken")
    return stop


# prompts.as_messages checks them, for the library too
_MESSAGES = {"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role"], "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
    "properties": {"role": {"type": "string", "examples": ["user"]}, "content": {"anyOf": [
        {"type": "string"}, {"type": "array", "items": {
            "type": "object", "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}},
    ]}},
}}  # fmt: skip
_BIAS = {"type": "number", "minimum": -LARGEST_BIAS, "maximum": LARGEST_BIAS}
_BIASES: Any = Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,19}$"}})
TokenId = Annotated[int, Field(strict=True), WithJsonSchema({"type": "integer", "minimum": 0})]
Whole = Annotated[int, BeforeValidator(_refuse_flag)]
Real = Annotated[float, BeforeValidator(_refuse_flag)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema(_MESSAGES)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
TOOLS: Any = Field(max_length=1024, fail_fast=True)
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Stop = Annotated[str | Annotated[list[str], Field(max_length=128)], AfterValidator(_check_stop)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def between(low: float, high: float | None = None, **more: Any) -> Any:
    """A field that may be left out, and the range that the schema says."""
    limits = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Field(None, json_schema_extra=limits | more)


PRIORITY = between(-MOST_URGENT, MOST_URGENT, description="smaller = admitted sooner where requests wait; default 0")


class Body(BaseModel):
    """An object of a request."""

    neutral: ClassVar[dict[str, Any]] = _NEUTRAL
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in values.items():
            if name in known or (name in _IGNORED and name not in cls.neutral):
                continue
            if name in cls.neutral and value is not None and value != cls.neutral[name]:
                raise FieldError(name, f"{name}={str(value)[:80]!r} is not supported; leave it out")
            if name not in cls.neutral:
                raise FieldError(str(name)[:80], unknown("field", str(name)[:80], sorted(known)))
        return {name: value for name, value in values.items() if name in known}


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_speculative: bool = Field(False, description="drafted and own tokens of every chunk, and figures last")
    include_rejected: bool = Field(False, description="also what was drafted in vain; needs the field above")


class TreeBudget(Body):
    """The largest tree that may be drafted in a round."""

    nodes: Whole = Field(ge=0, le=256, description="drafted tokens per round; 0 = do not draft")
    depth: Whole = Field(8, ge=0, le=256, description="how far ahead")
    width: Whole = Field(1, ge=1, le=256, description="1 = a chain, more = a tree")


class Speculative(Body):
    """How this request is to be drafted; what is left out is the server's choice."""

    enabled: bool = True
    drafter: Name | None = None
    budget: Whole | TreeBudget | None = Field(None, description="drafted tokens per round; 0 = do not draft")
    verifier: Name | None = None


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class TagStructure(Body):
    begin: str
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    end: str


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"] = "text"
    json_schema: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="in Lark's form, or in llama.cpp's EBNF")
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = Field(None, description="of a structural tag: `triggered_tags` of JSON schemas")


class StructuredOutputs(Body):
    """vLLM's field: one of what an answer must match, and how."""

    neutral: ClassVar[dict[str, Any]] = {
        "disable_fallback": False, "disable_additional_properties": False, "whitespace_pattern": None,
    }  # fmt: skip
    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="false = any whitespace in JSON, true = none; left out: a space behind , and : at most"
    )


class TextPart(Body):
    type: Literal["text"] = "text"
    text: str


class Prediction(Body):
    """What the answer is expected to be, such as a file that is to be edited: it is drafted, and changes no text."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class FunctionSpec(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: FunctionSpec


class Sampling(Body):
    """What all requests for a text may say, under whichever API's names they say the rest."""

    model: str | None = None
    temperature: Real | None = between(0, 1e4, description="0 = greedy; the default is 1, as in the API")
    top_p: Real | None = between(0, 1, exclusiveMinimum=0)
    top_k: Whole | None = between(-1, description="0 and -1 = off")
    min_p: Real | None = between(0, 1)
    presence_penalty: Real | None = between(-LARGEST_PENALTY, LARGEST_PENALTY)
    frequency_penalty: Real | None = between(-LARGEST_PENALTY, LARGEST_PENALTY)
    repetition_penalty: Real | None = between(1 / LARGEST_PENALTY, LARGEST_PENALTY)
    logit_bias: Annotated[dict[str, Annotated[Real, WithJsonSchema(_BIAS)]], _BIASES] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    min_tokens: Whole | None = between(0)
    max_thinking_tokens: Whole | None = between(0, description="of a model that thinks before it answers")
    ignore_eos: bool | None = None
    seed: Whole | None = None
    stream: bool | None = False
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    speculative: Speculative | Literal["off", "on"] | bool | None = None
    cache_salt: Name | None = None
    priority: Whole | None = PRIORITY
    record: bool | None = Field(
        None, description="may prompt and answer be kept to train drafters? Only where the server records"
    )


class Generation(Sampling):
    """What completions and chats share."""

    max_tokens: Whole | None = between(1)
    stop: Stop | None = None
    n: Whole | None = between(1, description="texts; with several prompts, of each")
    best_of: Whole | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: Whole | None = between(0, MOST_PROMPT_LOGPROBS, description="of the prompt's tokens; not streamed")
    add_special_tokens: bool | None = None


class CompletionRequest(Generation):
    prompt: Texts
    echo: bool | None = False
    suffix: str | None = None
    logprobs: Whole | None = between(0, MOST_LOGPROBS)


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: Whole | None = between(1)
    logprobs: bool | None = False
    top_logprobs: Whole | None = between(0, MOST_LOGPROBS)
    tools: Annotated[list[Tool], TOOLS] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="false = one call at most")
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _offer_allowed_tools(self) -> Self:
        """OpenAI's `allowed_tools`: some of the tools, of which one may or must be called."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return self
        inner = choice.get("allowed_tools")
        mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ValueError("tool_choice.allowed_tools needs a mode, auto or required, and a list of tools")
        names = [each.get("function", each).get("name") if _is_named(each) else None for each in tools]
        known: dict[Any, Tool] = {tool.function.name: tool for tool in self.tools or ()}
        if lost := [name for name in names if not isinstance(name, str) or name not in known]:
            raise ValueError(f"tool_choice allows a tool that was not offered: {str(lost[0])[:80]!r}")
        self.tools, self.tool_choice = [known[name] for name in dict.fromkeys(names)], mode
        return self


def _is_named(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", tool), dict)


class DoorRequest(ChatRequest):
    """A request of another API, as the chat that it asks for."""

    echo: dict[str, Any] = Field(default_factory=dict)  # what the answer repeats of the request


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
