"""Eleven JSON schemas with six prompts each: 66 answers of the kind that people ask for.

Texts have a `maxLength` and numbers a range where the small default model was seen to repeat itself without end
otherwise: any schema may be written on for ever there, whatever its whitespace.
"""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    """All are required, in this order."""
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


STRING: dict[str, Any] = {"type": "string"}
LINE, WORD = {**STRING, "maxLength": 60}, {**STRING, "maxLength": 24}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


def _list(items: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_STEP = _object(explanation=LINE, output=WORD)
YEAR = {"type": "integer", "minimum": 0, "maximum": 2100}
SCHEMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "reasoning, then an answer": (_object(reasoning={**STRING, "maxLength": 120}, answer=INTEGER), [
        "What is 3 + 4?", "Tom has 12 apples and eats 5. How many are left?", "How many legs do four cats have?",
        "What is 6 times 7?", "A train runs 60 km in an hour. How far in three?", "How many days are in two weeks?",
    ]),
    "a person": (_object(name=STRING, age=INTEGER, city=STRING, is_student=BOOLEAN), [
        "Anna is 31, lives in Oslo and works as a nurse.", "Bob, a student from Paris, turned 20 last week.",
        "Describe a made-up person.", "My neighbour Carla is 67 and has always lived in Rome.",
        "Who wrote Hamlet?", "Give me a character for a story about a fisherman.",
    ]),
    "a sentiment": (_object(sentiment=_one_of("positive", "negative", "neutral"), confidence=NUMBER), [
        "I loved every minute of this film.", "The food was cold, the waiter rude.", "The parcel came on Tuesday.",
        "Not bad, but I would not buy it again.", "Best phone I ever had!", "It broke after two days.",
    ]),
    "a list of words": (_object(items=_list(WORD, 5)), [
        "Name three fruits.", "List five animals that can fly.", "Which colours does a traffic light have?",
        "Name some rivers in Europe.", "What do I need to bake bread?", "List four programming languages.",
    ]),
    "nested": (_object(title=LINE, author=_object(name=WORD, born=YEAR), tags=_list(WORD, 4)), [
        "Describe a famous book.", "Describe a book about the sea.", "Describe a book for children.",
        "Describe a cookbook.", "Describe a history of Rome.", "Describe a novel about a detective.",
    ]),
    "steps": (_object(steps=_list(_STEP, 3), final_answer=WORD), [
        "Solve 2x + 3 = 7.", "How do I boil an egg?", "Solve x - 5 = 1.", "How do I change a light bulb?",
        "Solve 3x = 12.", "How do I plant a tree?",
    ]),
    "with $defs": ({
        "$defs": {"Point": _object(x=INTEGER, y=INTEGER)},
        "type": "object", "required": ["label", "start", "end"], "additionalProperties": False,
        "properties": {"label": WORD, "start": {"$ref": "#/$defs/Point"}, "end": {"$ref": "#/$defs/Point"}},
    }, [
        "Draw a line from the origin to (3, 4).", "Draw a horizontal line of length 5.", "Draw a vertical line.",
        "Draw a line from (1, 1) to (2, 2).", "Draw a diagonal line.", "Draw a short line named a.",
    ]),
    "one of two": ({"anyOf": [
        _object(kind={"const": "circle"}, radius=NUMBER), _object(kind={"const": "square"}, side=NUMBER),
    ]}, [
        "A circle with a radius of 2.", "A square with sides of 5.", "Draw something round.", "Draw a box.",
        "A wheel of 30 cm across.", "A chess board.",
    ]),
    "formats": (_object(
        date={**STRING, "format": "date"}, email={**STRING, "format": "email", "maxLength": 40},
    ), [
        "Ann (ann@example.com) comes on 5 March 2024.", "Write to bob@example.org before 2023-12-24.",
        "When was the first of May 2020, and who asks? c@d.net.", "A meeting with info@example.com today.",
        "My birthday is 1990-07-15; mail me at me@example.com.", "Invent an appointment.",
    ]),
    "limits": (_object(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
        amount={"type": "integer", "minimum": 1, "maximum": 500}, note={"type": "string", "maxLength": 40},
    ), [
        "Two boxes of AB-123, urgent.", "Order 40 of XY-9999.", "A dozen screws, please.", "Send one QQ-1001.",
        "500 labels, white.", "Cancel order ZZ-77777.",
    ]),
    "optional and null": ({
        "type": "object", "required": ["question"], "additionalProperties": False,
        "properties": {"question": LINE, "hint": {"anyOf": [LINE, {"type": "null"}]}, "difficulty": INTEGER},
    }, [
        "Ask me something about whales.", "Ask me an easy question.", "Ask me about the moon.",
        "Ask me a hard question about sums.", "Ask me about France.", "Ask me about music.",
    ]),
}  # fmt: skip
ANSWERS = [(name, schema, prompt) for name, (schema, prompts) in SCHEMAS.items() for prompt in prompts]
