"""Questions to a vision-language model: its answer is held, and its words are the targets.

A question about an image, with its answer, makes a model of its own; requests name it `MODEL?ID`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from vitreous._support.words import finite
from vitreous.models.facts import facts_of
from vitreous.models.speaker import Speaker, WordsModel
from vitreous.trace.trace import Trace
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import JOB, Client, Served
from vitreous.web.engine import key_of
from vitreous.web.jobs import Job
from vitreous.web.problems import Problem

router = APIRouter()
TOKENS = 64  # of an answer, at most


class AnswerAsked(schema.OfImage):
    question: Annotated[str, Field(min_length=1, max_length=300, examples=["What is this?"])]
    answer: Annotated[str, Field(min_length=1, max_length=300)] | None = None  # None: the model's own
    most: Annotated[int, Field(ge=1, le=TOKENS)] = 32  # tokens of its own answer


class AnswerWord(BaseModel):
    target: str  # "word:3"
    text: str
    probability: schema.Number


class Answered(BaseModel):
    """The SSE event `answer`."""

    model: str  # MODEL?ID: the name by which requests call the model with this answer
    question: str
    text: str
    words: list[AnswerWord]


@router.post("/answers", status_code=202, responses=JOB)
async def ask(engine: Served, client: Client, asked: AnswerAsked) -> schema.Started:
    """Ask a vision-language model about an image, or give it an answer; its words are then targets of `MODEL?ID`."""
    served = engine.find(asked.model)
    speaker = speaker_of(served)
    engine.expect(asked.image)
    question = asked.question.strip()
    if not question:
        raise Problem(422, "the question is empty; write one, e.g. What is this?")
    if asked.answer is not None and not 0 < len(speaker.encoded(asked.answer)) <= TOKENS:
        raise Problem(422, f"an answer has 1 to {TOKENS} tokens; give another, or none: then the model answers")

    def work(job: Job) -> None:
        job.report({"what": "answering", "done": 0, "total": 1, "seconds_left": None})
        ids = answer_of(engine, served, speaker, asked, question)
        job.check()
        held = hold(engine, served, speaker, question, ids)
        job.tell("answer", told(held, engine.trace(held, asked.image)).model_dump(mode="json"))

    return schema.Started(job=engine.start(client, served, work).id)


def speaker_of(served: engines.Served) -> Speaker:
    model = served.model
    if not isinstance(model, WordsModel):
        raise Problem(422, f"{served.name} answers no questions; {model.form.value}")
    return model.speaker


def answer_of(
    engine: engines.Engine, served: engines.Served, speaker: Speaker, asked: AnswerAsked, question: str
) -> list[int]:
    """The tokens of the given answer, or of the model's own."""
    if asked.answer is not None:
        return speaker.encoded(asked.answer)
    seen = served.model.prepare([engine.picture(asked.image, served).image])
    with facts_of(speaker.net).lock:
        return speaker.generate(question, seen, asked.most)


def hold(
    engine: engines.Engine, served: engines.Served, speaker: Speaker, question: str, ids: list[int]
) -> engines.Served:
    """The model with this question and answer, kept under a name of its own."""
    base = served.name.partition("?")[0]
    name = f"{base}?{key_of(base, question, ids)}"
    kept = engine.answers.get(name)
    if kept is None:
        made = speaker.model(question, ids)
        made.spec, made.weights, made.notes = served.model.spec, served.model.weights, served.model.notes
        kept = replace(served, name=name, model=made)
        engine.answers.put(name, kept)
    return kept


def told(held: engines.Served, trace: Trace) -> Answered:
    model = held.model
    assert isinstance(model, WordsModel)
    shares = model.meaning.probabilities(trace.output[0].float())
    words = [
        AnswerWord(
            target=f"word:{number}",
            text=word.text,
            probability=finite(shares[list(word.tokens), list(word.ids)].prod()),
        )
        for number, word in enumerate(model.words)
    ]
    text = " ".join(str(model.speaker.tokenizer.decode(model.answer)).split())
    return Answered(model=held.name, question=model.question, text=text, words=words)
