"""Prompt templates around passages, for the kinds of task that have long prompts, and the share of each kind.

A drafter sees every wording many times, so they differ in length, place (before or after the text) and manner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARES: Mapping[str, float] = {  # of the prompts that are made from passages
    "summarise": 0.24,
    "retrieve": 0.24,
    "turns": 0.16,
    "translate": 0.12,
    "sentence": 0.08,
    "rework": 0.10,
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
