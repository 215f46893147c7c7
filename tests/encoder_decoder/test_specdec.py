"""SpecDec: the block drafter of encoder-decoders never changes a text, learns, and drafts what it has learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, PlainSeq, Request, TreeBatch, Verdict
from forerun.drafters.base import Parts
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.specdec import SpecDecConfig, SpecDecDrafter, load_specdec, read_specdec, write_specdec
from forerun.engine.engine import Engine
from forerun.heads import open_head
from forerun.models.load.checkpoint import open_checkpoint
from forerun.testing import TableLM
from forerun.train.data.corpus import Batch, Batches, Corpus
from forerun.train.data.make import make_data
from forerun.train.options import DataOptions, TrainOptions
from forerun.train.recipes.block import SpecDecRecipe, source_lengths
from forerun.train.run import train
from forerun.train.teacher import load_source_teacher
from tests.encoder_decoder.marian_folder import WORDS, make_folder
from tests.encoder_decoder.test_target import write
from tests.encoder_decoder.tiny_models import VOCAB, eos_of, make_model, make_target, reference, sources

WIDTH, TOKENS = 32, 24


def random_head(folder: Path, draft_vocab: int = 40, depth: int = 2) -> Path:
    config = SpecDecConfig(WIDTH, 48, 4, depth, levels=5, vocab_size=VOCAB, draft_vocab_size=draft_vocab)
    chosen = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=chosen) * 0.3 for name, shape in config.shapes().items()}
    ids = torch.randperm(VOCAB, generator=chosen)[:draft_vocab].sort().values
    write_specdec(folder, config, weights, DraftVocabulary(ids, VOCAB))
    return folder


def engine_for(name: str, head: Path, width: int = 2, **options: object) -> Engine:
    speculative = SpeculativeConfig(drafter="specdec", draft_model=str(head), controller="fixed", budget=6, width=width)
    target = make_target(name, **options)
    return make_engine(target, frozenset({eos_of(name)}), speculative, EngineConfig(max_batch=4))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("head"))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("in_torch", [False, True])
def test_texts_are_those_of_transformers_in_a_batch(name: str, head: Path, in_torch: bool) -> None:
    prompts = sources(9)
    engine = engine_for(name, head, in_torch=in_torch)
    assert write(engine, prompts, SamplingParams(max_tokens=TOKENS)) == [
        reference(name, prompt, TOKENS) for prompt in prompts
    ]
    assert engine.stats.drafted > 0
    assert engine.target.used_slots == 0
    drafter = engine.drafters.get("specdec")
    assert isinstance(drafter, SpecDecDrafter)
    assert not drafter._sources
    assert not drafter._sequences


@pytest.mark.slow
def test_sampled_texts_are_those_of_the_seed(head: Path) -> None:
    prompts, params = sources(5, seed=4), SamplingParams(max_tokens=TOKENS, temperature=0.6, seed=11)
    engine = engine_for("marian", head)
    texts = write(engine, prompts, params)
    assert engine.stats.drafted > 0
    plain = make_engine(make_target("marian"), frozenset({eos_of("marian")}))
    assert texts == write(plain, prompts, params)


def test_requests_with_other_drafters_share_its_batch(head: Path) -> None:
    """And each drafter sees the sources of its own sequences: a wrong one would not have the right length."""
    engine, prompts = engine_for("marian", head), sources(6, seed=2)
    names = ["specdec", "none", "ngram", "specdec", "ngram", "specdec"]
    params = SamplingParams(max_tokens=TOKENS)
    seqs = [engine.submit(Request(prompt, params, drafter=name)) for prompt, name in zip(prompts, names, strict=True)]
    drafter = engine.drafters.get("specdec")
    assert isinstance(drafter, SpecDecDrafter)
    texts: dict[int, list[int]] = {seq: [] for seq in seqs}
    lengths: dict[int, int] = {}
    while engine.busy:
        for event in engine.step():
            texts[event.seq_id] += event.tokens
        lengths |= {seq: source.shape[-2] for seq, source in drafter._sources.items()}
    assert [texts[seq] for seq in seqs] == [reference("marian", prompt, TOKENS) for prompt in prompts]
    mine = [i for i, name in enumerate(names) if name == "specdec"]
    assert lengths == {seqs[i]: len(prompts[i]) for i in mine}


@pytest.mark.slow
def test_a_full_cache_sends_sequences_back_and_they_are_read_again(head: Path) -> None:
    prompts = sources(5, seed=6)
    engine = engine_for("t5", head, kv_slots=2 * TOKENS)
    texts = write(engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert texts == [reference("t5", prompt, TOKENS) for prompt in prompts]


def test_other_targets_and_other_files_are_refused(head: Path, tmp_path: Path) -> None:
    speculative = SpeculativeConfig(drafter="specdec", draft_model=str(head))
    with pytest.raises(InvalidInput, match="no encoder"):
        SpecDecDrafter.build(Parts(TableLM(VOCAB), None, speculative))
    config, weights, vocabulary = read_specdec(head)
    other = replace(config, vocab_size=VOCAB + 1)
    write_specdec(tmp_path / "other", other, weights, DraftVocabulary(vocabulary.ids, VOCAB + 1))
    with pytest.raises(InvalidInput, match="65 tokens"):
        SpecDecDrafter.build(Parts(make_target("t5"), None, replace(speculative, draft_model=str(tmp_path / "other"))))
    values = json.loads((head / "config.json").read_text())
    for damage in ({"num_attention_heads": 5}, {"block_size": 0}, {"hidden_size": "x"}, {"embedding_scale": None}):
        with pytest.raises(DamagedFile):
            SpecDecConfig.from_json(values | damage)
    found = open_head(head)
    assert found is not None
    assert found.drafter == "specdec"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def texts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tiny model makes of sentences of its words."""
    out, chosen = tmp_path_factory.mktemp("texts"), torch.Generator().manual_seed(0)
    words = [word.strip("\u2581") for word in WORDS if word.startswith("\u2581") and len(word) > 1]
    lines = {
        " ".join(words[int(i)] for i in torch.randint(len(words), (4 + n % 6,), generator=chosen)) for n in range(160)
    }
    (out / "sentences.txt").write_text("\n".join(sorted(lines)), encoding="utf-8")
    options = DataOptions(
        str(folder), str(out), prompts=(str(out / "sentences.txt"),), own_prompts=0, temperatures=(0.0,),
        max_prompt=32, max_length=56, batch=16, device="cpu",
    )  # fmt: skip
    make_data(options)
    return out


def options_for(folder: Path, texts: Path, out: Path, **more: object) -> TrainOptions:
    base = TrainOptions(
        "specdec", str(folder), str(texts), str(out), steps=1, batch_tokens=512, layers=1, levels=3, holdout=0.2,
        vocab=48, lr=5e-3, eval_every=1000, eval_batches=2, anchors=1.0, device="cpu",
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def test_data_are_sources_and_what_the_target_writes_for_them(folder: Path, texts: Path) -> None:
    corpus = Corpus(texts, max_length=56, holdout=0.2)
    start = make_model("marian").config.decoder_start_token_id
    for first, end, answer in corpus.held_back[:4]:
        source, output = corpus.tokens[first:answer].tolist(), corpus.tokens[answer:end].tolist()
        assert source[-1] == 0, "a source has its end token"
        assert output == reference("marian", tuple(source), 56 - len(source))
        assert start not in output
    with pytest.raises(InvalidInput, match="own-prompts 0"):
        make_data(DataOptions(str(folder), str(texts / "none"), own_prompts=5, device="cpu"))


def test_the_teachers_rows_are_the_targets(folder: Path, texts: Path) -> None:
    corpus = Corpus(texts, max_length=56, holdout=0.2)
    batch = Batches(corpus, corpus.training, 256, 0).at(0)
    teacher = load_source_teacher(open_checkpoint(str(folder)), torch.device("cpu"))
    encoded, rows = teacher.read(batch)
    drafter = SpecDecDrafter(SpecDecRecipe(options_for(folder, texts, texts / "x"), teacher, corpus)._head)
    target, lengths = make_target("marian"), source_lengths(batch.learnt).tolist()
    for row in range(3):
        length, end = lengths[row], int(batch.learnt[row].nonzero()[-1]) + 1
        tokens = batch.tokens[row, :end].tolist()
        seq = PlainSeq(row, [teacher.start, *tokens[length:]], source=tuple(tokens[:length]))
        _, scores = target.prefill([seq], drafter.needs)
        assert scores.encoded is not None
        assert torch.allclose(scores.encoded[0], encoded[row, :length], atol=1e-4)
        assert torch.allclose(scores.hidden[-1], rows[row, length - 1 : end - 1], atol=1e-3)
        assert not rows[row, : length - 1].any()


def test_what_is_trained_is_what_drafts(folder: Path, texts: Path, tmp_path: Path) -> None:
    """The recipe's rows of a block and the drafter's own candidates are the same tokens."""
    corpus = Corpus(texts, max_length=56, holdout=0.2)
    teacher = load_source_teacher(open_checkpoint(str(folder)), torch.device("cpu"))
    torch.manual_seed(0)
    recipe = SpecDecRecipe(options_for(folder, texts, tmp_path, layers=2), teacher, corpus)
    drafter, vocabulary = SpecDecDrafter(recipe._head), recipe.vocabulary
    first, end, answer = corpus.training[0]
    tokens, length = corpus.tokens[first:end].tolist(), answer - first
    learnt = torch.arange(end - first)[None] >= length
    batch = Batch(torch.tensor([tokens]), learnt)
    outputs = list(recipe.outputs(batch, recipe.read(batch), None))
    guesses = [vocabulary.ids[(out.rows @ recipe.lm_head().t()).argmax(-1)].tolist() for out in outputs]
    assert outputs[0].at is not None
    compared = 0
    for i, place in enumerate(outputs[0].at.tolist()):
        written = [teacher.start, *tokens[length : place + 1]]
        target, seq = make_target("marian"), PlainSeq(0, written, source=tuple(tokens[:length]))
        chains, scores = target.prefill([seq], drafter.needs)
        drafter.observe([seq], chains, scores, Verdict.whole_chain(chains, written[-1:]))
        drafted = drafter.propose([seq], [Budget(3, 3)]).tokens.tolist()[1:]
        wanted = [level[i] for level in guesses if i < len(level)]
        assert drafted[: len(wanted)] == wanted
        compared += len(wanted)
        drafter.forget(seq)
    assert compared > 10


def test_no_block_has_a_root_before_its_output(folder: Path, texts: Path, tmp_path: Path) -> None:
    teacher = load_source_teacher(open_checkpoint(str(folder)), torch.device("cpu"))
    recipe = SpecDecRecipe(options_for(folder, texts, tmp_path), teacher, Corpus(texts, max_length=56, holdout=0.2))
    batch = Batch(
        torch.tensor([[5, 0, 7, 8]]), torch.tensor([[False, False, True, True]])
    )  # fewer roots than asked for
    roots = [out.at for out in recipe.outputs(batch, recipe.read(batch), None)]
    assert len(roots) > 1
    assert all(root >= 1 for at in roots if at is not None for root in at.tolist())


@pytest.mark.slow
def test_it_learns_and_what_it_writes_drafts_better(folder: Path, texts: Path, tmp_path: Path) -> None:
    options = options_for(folder, texts, tmp_path / "head", steps=50)
    before = train(replace(options, out=str(tmp_path / "untrained"), steps=1)).tokens_per_round
    measured = train(options)
    assert measured.tokens_per_round > before + 0.2
    corpus = Corpus(texts, max_length=56, holdout=0.2)
    prompts = [tuple(corpus.tokens[first:answer].tolist()) for first, _, answer in corpus.held_back[:12]]
    per_round = {}
    for head in ("untrained", "head"):
        engine = engine_for("marian", tmp_path / head, width=1)
        found = write(engine, prompts, SamplingParams(max_tokens=TOKENS))
        assert found == [reference("marian", prompt, TOKENS) for prompt in prompts]
        per_round[head] = engine.stats.tokens / engine.stats.rounds
    assert per_round["head"] > per_round["untrained"]
    assert load_specdec(tmp_path / "head", torch.device("cpu")).config.rates == measured.rates


def test_a_drafter_that_was_shown_no_source_drafts_nothing(head: Path) -> None:
    drafter, seq = SpecDecDrafter(load_specdec(head, torch.device("cpu"))), PlainSeq(0, [0], source=(4, 1))
    assert drafter.propose([seq], [Budget(3, 3)]).tokens.tolist() == [0]
    target = make_target("t5")
    chains, scores = target.prefill([seq], drafter.needs)
    drafter.observe([seq], chains, scores, Verdict.whole_chain(chains, [0]))
    assert drafter.propose([seq], [Budget(3, 3)]).nodes == 4
    seq.tokens.append(9)  # a row is missing now
    assert drafter.propose([seq], [Budget(3, 3)]).nodes == 1
    assert isinstance(drafter.propose([seq], [Budget(0, 0)]), TreeBatch)
