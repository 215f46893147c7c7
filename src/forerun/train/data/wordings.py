"""Prompt templates around passages, for the kinds of task that have long prompts, and the share of each kind.

A drafter sees every wording many times, so they differ in length, place (before or after the text) and manner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARES: Mapping[str, float] = {  # of the prompts that are made from passages of prose
    "summarise": 0.24,
    "retrieve": 0.24,
    "turns": 0.16,
    "translate": 0.10,
    "sentence": 0.06,
    "rework": 0.08,
    "point": 0.04,
    "extract": 0.08,
}
CODE_SHARES: Mapping[str, float] = {  # of those made from passages that hold code
    "edit": 0.60,
    "turns": 0.20,
    "retrieve": 0.08,
    "rework": 0.06,
    "point": 0.06,
}
LANGUAGES: Sequence[str] = ("German", "French", "Spanish", "Chinese")

SUMMARISE: Sequence[str] = (
    "Summarize the following article in three sentences:\n\n{text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "Please write a short summary of this text.\n\n{text}",
    "Summarize: {text}",
    "Here is a text:\n\n{text}\n\nWhat does it say, in at most fifty words?",
    "Read this and give me the key facts as a bulleted list.\n\n{text}",
    "{text}\n\nTL;DR",
    "Article:\n{text}\n\nSummary:",
    "I have no time to read all of this. Can you condense it into one paragraph?\n\n{text}",
    "Write a headline and a two-sentence abstract for the text below.\n\n{text}",
)
SUMMARISE_SEVERAL: Sequence[str] = (
    "Summarize each of the following texts in one or two sentences.\n\n{text}",
    "{text}\n\nGive a short summary of every text above, in the same order.",
    "Below are some notes from my reading. Write a summary of them that I can use for revision.\n\n{text}",
    "Here are several short articles:\n\n{text}\n\nWrite a digest: a title and one sentence for each.",
)
RETRIEVE: Sequence[str] = (
    "Answer the question using the passages below.\n\n{text}\n\nQuestion: {question}",
    "Question: {question}\n\nUse these documents to answer it:\n\n{text}",
    "{text}\n\nWith the help of what is written above, answer this: {question}",
    "You are given some search results. Some may not help.\n\n{text}\n\nNow reply to the user: {question}",
    "Context:\n{text}\n\nUser: {question}\n\nReply briefly and rely on the context only.",
    "{question}\n\nHere is some background for your reply:\n\n{text}",
    "Find the part of the text that deals with the request, then answer.\n\n{text}\n\nRequest: {question}",
)
LABELS: Sequence[str] = ("Passage {n}: {text}", "[{n}] {text}", "Document {n}\n{text}", "({n}) {text}")
TRANSLATE: Sequence[str] = (
    "Translate the following text into {language}:\n\n{text}",
    "{text}\n\nTranslate this into {language}.",
    "Please give me a {language} version of this text. Keep the layout.\n\n{text}",
    "How would you say this in {language}?\n\n{text}",
    "English text:\n{text}\n\n{language} translation:",
    "You are a translator. Put this into natural {language}, and add nothing of your own.\n\n{text}",
)
SENTENCE: Sequence[str] = (
    "Translate this sentence into {language}: {text}",
    "Translate English to {language}: {text}",
    "What is the {language} for: {text}",
    '"{text}" How do I say that in {language}?',
    "{text}\n\nTranslate the sentence above to {language}.",
    "Give the {language} translation, nothing else.\n{text}",
)
REWORK: Sequence[str] = (
    "Rewrite the text below in simpler words.\n\n{text}",
    "{text}\n\nContinue this text with one more paragraph.",
    "Explain the following to somebody who knows nothing about it:\n\n{text}",
    "Improve the style of this text, but keep its meaning:\n\n{text}",
    "Rewrite this as a friendly e-mail to a colleague.\n\n{text}",
    "{text}\n\nCorrect any mistakes in the text above and print it again.",
    "Turn the following into a dialogue between a teacher and a student.\n\n{text}",
    "Make this half as long without losing anything important:\n\n{text}",
)
POINT: Sequence[str] = (
    "What is the main point of this text?\n\n{text}",
    "{text}\n\nWhat is this about? Answer in one sentence.",
    "Write three questions that this text answers, each with its answer.\n\n{text}",
    "Which words of this text matter most, and why?\n\n{text}",
    "Do you agree with what is said here? Give your reasons.\n\n{text}",
    "Read the text and suggest a good title for it.\n\n{text}",
)
FOLLOW_UPS: Sequence[str] = (
    "Can you make it shorter?",
    "Give an example.",
    "Explain it to a child.",
    "Thanks. Now put it in a bulleted list.",
    "Why is that?",
    "Can you say that again in other words?",
    "Please go into more detail on the last part.",
    "What are the arguments against this?",
    "Could you write it in a more formal tone?",
    "Translate your answer into {language}.",
    "Summarize what you just said in one sentence.",
    "Are you sure? Check your answer step by step.",
    "What should I read or try next?",
    "Now write it as a short poem.",
)
EXTRACT: Sequence[str] = (
    "List what this text says as a JSON object. Reply with JSON alone.\n\n{text}",
    "{text}\n\nConvert the information above to JSON.",
    "Turn this into a JSON array with one object per item, each with a name and a description.\n\n{text}",
    "Which names, numbers and dates are in the text? Answer as JSON with three lists.\n\n{text}",
    "{text}\n\nMake a Markdown table of this.",
    "Write the content of this text as YAML:\n\n{text}",
)
EDIT: Sequence[str] = (  # {name} is a function or class of the code
    "Add a comment or docstring to every function. Print the complete code again.\n\n{code}",
    "{code}\n\nPut in type hints where they are missing and show me the full result.",
    "I do not like the name `{name}`. Call it `run_{name}` and give me the new version of everything.\n\n{code}",
    "{code}\n\nWhat if an argument is empty or missing? Handle that in `{name}`, leave the rest alone, print it all.",
    "Find the mistake in this code, if there is one, and reply with the corrected program.\n\n{code}",
    "Can you clean this up? Same behaviour, same names, whole program please.\n\n{code}",
    "{code}\n\nLog one line at the beginning of `{name}`. Code only, no explanation.",
    "Give `{name}` one more optional parameter, `verbose`, which prints what happens. Show the entire code.\n\n{code}",
    "{code}\n\nRepeat this code without its comments and blank lines.",
    "Write unit tests for this code.\n\n{code}",
    "Explain this code step by step, quoting the lines that you talk about.\n\n{code}",
    "{code}\n\nMake it faster if that is possible, and say what you changed.",
    "Rewrite the code below as a class with methods. Keep the logic.\n\n{code}",
    "Port this to another programming language of your choice:\n\n{code}",
)
