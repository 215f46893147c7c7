"""Draft models with another tokenizer: which tokens correspond, what is read to them, and the law that comes out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import VocabularyMismatch
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import CascadeDrafter, ModelDrafter, TextDrafter
from forerun.drafters.model.translated import Spelling, TokenMap, TranslatedTarget
from forerun.testing import FakeSeq, TableLM, check_drafter, check_target
from tests.exactness.harness import chi_square_p, joint_law, run, sample_texts, table

SPACE, MARK = "\u0120", "\u2581"
WORDS = {"a": 0, "b": 1, "ab": 2, "c": 3, f"{SPACE}a": 4, "<end>": 5}  # the target's: byte level
# the draft's
OTHERS = {"<s>": 0, "b": 1, "a": 2, f"{MARK}a": 3, "d": 4, "<0x63>": 5, "ba": 6, "</s>": 7, "bad": 8}


def spelt() -> tuple[Spelling, Spelling]:
    return Spelling.of(WORDS, [], [5]), Spelling.of(OTHERS, [], [7], bos=0)


def encode(text: str) -> list[int]:
    """The target's tokenizer: the longest token first."""
    ids, pieces = list[int](), {" a": 4, "ab": 2, "a": 0, "b": 1, "c": 3}
    while text:
        piece = next((p for p in pieces if text.startswith(p)), None)
        if piece is not None:
            ids.append(pieces[piece])
        text = text[len(piece or "?") :]
    return ids


def letters(vocab_size: int = 6) -> TokenMap:
    return TokenMap.between(*spelt(), vocab_size, encode)


def test_spaces_bytes_and_ends_correspond_however_they_are_spelt() -> None:
    found = letters()
    pairs = dict(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    assert pairs == {0: 2, 1: 1, 3: 5, 4: 3, 5: 7}  # a, b, c as a byte, " a", the end; not "ab"
    assert found.pieces[2] == (2, 1)  # "ab" is read as a and b
    assert found.prefix == (0,)
    assert found.ends == {7: 5}
    assert found.read([2, 4]) == [2, 1, 3]


def test_every_byte_has_a_spelling_and_no_two_the_same() -> None:
    from forerun.models.load.tokenizer import _byte_of

    assert sorted(_byte_of().values()) == list(range(256))
    assert _byte_of()[SPACE] == 0x20


def test_special_tokens_correspond_by_name_and_never_to_text() -> None:
    ours = Spelling.of({"<x>": 0, "<y>": 1, "x": 2}, [0, 1])
    theirs = Spelling.of({"<x>": 0, "x": 2, "<": 3, "y": 4, ">": 5}, [0])
    found = TokenMap.between(ours, theirs, 4)
    pairs = dict(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    assert pairs == {0: 0, 2: 2}
    assert found.pieces[1] == (3, 4, 5)  # read as text; never drafted
    assert len(found.pieces[3]) == 1  # a padding id: anything


def test_of_two_tokens_for_the_same_bytes_one_is_drafted() -> None:
    ours = Spelling({0: b"x", 1: b"x", 2: b"y"}, {})
    theirs = Spelling({0: b"x", 1: b"y", 2: b"x"}, {})
    found = TokenMap.between(ours, theirs, 3)
    assert sorted(found.target_ids.tolist()) == [0, 2]
    assert sorted(found.draft_ids.tolist()) == [0, 1]
    assert found.pieces[1] == (0,)


def test_vocabularies_with_nothing_in_common_are_refused() -> None:
    ours = Spelling({0: b"x"}, {})
    with pytest.raises(VocabularyMismatch, match="0 of its 1 tokens"):
        TokenMap.between(ours, Spelling({0: b"y"}, {}), 1)


def scrambled() -> TokenMap:
    """A map in which every token is shared, and yet some are read in several pieces: only a test would do that."""
    ids = torch.arange(5)
    return TokenMap(5, ids, ids.flip(0), [(0,), (1, 2), (3,), (2, 2, 4), (1,)], prefix=(4,))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_target(seed: int) -> None:
    check_target(lambda: TranslatedTarget(TableLM(5, order=3), scrambled()), vocab_size=5, rounds=9, seed=seed)


def test_the_law_of_a_draft_is_that_of_the_shared_tokens() -> None:
    found, draft = letters(), TableLM(9, seed=3)
    drafter = ModelDrafter(TranslatedTarget(draft, found), 6)
    seq = FakeSeq(0, [0, 2, 1], params=SamplingParams(temperature=0.7), seed=4)
    trees = drafter.propose([seq], [Budget(2, 2)])
    assert trees.drawn_from is not None
    tokens = trees.tokens.tolist()
    read = [0, 2, 2, 1, 1]  # <s> a (a b) b
    for depth, before in ((1, read), (2, [*read, *found.pieces[tokens[1]]])):
        law = (draft.logits(before) / 0.7).softmax(-1)
        wanted = torch.zeros(6)
        wanted[found.target_ids] = law[found.draft_ids]
        row = int(trees.drawn_from.rows[depth])
        assert torch.allclose(trees.drawn_from.laws[row], wanted / wanted.sum(), atol=1e-6)
    assert float(trees.drawn_from.laws[:, 2].sum()) == 0.0  # "ab" is never drafted


Make = Callable[[], TranslatedTarget]
PROMPT, WARM = (0, 1, 2, 0, 1, 4, 0), SamplingParams(temperature=0.9, max_tokens=3)


def translated() -> TranslatedTarget:
    return TranslatedTarget(TableLM(9, seed=3), letters())


def engine(drafter: str, verifier: str, made: TranslatedTarget | None = None) -> object:
    speculative = SpeculativeConfig(drafter, verifier=verifier, budget=4, width=2, controller="fixed")
    draft = made or translated()
    return make_engine(table(6), frozenset(), speculative, EngineConfig(max_batch=64), draft_target=draft)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["exact", "block"])
@pytest.mark.parametrize("drafter", ["draft_model", "draft_text", "ngram>draft_model"])
def test_the_targets_law_comes_out(drafter: str, verifier: str) -> None:
    counts = sample_texts(engine(drafter, verifier), PROMPT, WARM, 1000)  # type: ignore[arg-type]
    assert chi_square_p(counts, joint_law(table(6), PROMPT, WARM, 3)) > 1e-4


@pytest.mark.slow
def test_negative_control_a_law_that_was_not_masked_is_caught() -> None:
    """What is not shared keeps some of the law that goes with the draft, though it can never be drawn."""

    class Unmasked(ModelDrafter):
        def propose(self, seqs: object, budgets: object) -> object:  # type: ignore[override]
            trees = super().propose(seqs, budgets)  # type: ignore[arg-type]
            if trees.drawn_from is not None:
                trees.drawn_from.laws.mul_(0.5)
                trees.drawn_from.laws[:, 2] = 0.5
            return trees

    made = engine("draft_model", "exact")
    made.drafters.add("draft_model", Unmasked(translated(), 6))  # type: ignore[attr-defined, arg-type]
    counts = sample_texts(made, PROMPT, WARM, 1000)  # type: ignore[arg-type]
    assert chi_square_p(counts, joint_law(table(6), PROMPT, WARM, 3)) < 1e-4


@pytest.mark.parametrize("drafter", ["draft_model", "draft_text", "ngram>draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_plain_ones(drafter: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3 if temperature else None, max_tokens=20)
    requests = [Request(prompt, params) for prompt in (PROMPT, (5,), (2, 2, 2), (4, 3))]
    plain = run(engine("none", "auto"), requests)  # type: ignore[arg-type]
    made = engine(drafter, "auto")
    assert run(made, requests) == plain  # type: ignore[arg-type]
    assert made.target.used_slots == 0  # type: ignore[attr-defined]


def test_the_contract() -> None:
    check_drafter(lambda: ModelDrafter(translated(), 6), vocab_size=6)
    check_drafter(lambda: TextDrafter(translated(), 6), vocab_size=6)
    check_drafter(lambda: TextDrafter(TableLM(6), 6), vocab_size=6)
    check_drafter(lambda: CascadeDrafter(NgramDrafter(), ModelDrafter(translated(), 6)), vocab_size=6)


class Writes(TableLM):
    """A draft model that writes given tokens after a prompt of so many."""

    def logits(self, tokens: object) -> torch.Tensor:
        script = [1, 2, 1, 6, 7]  # b a b ba end
        at = len(tokens) - 3  # type: ignore[arg-type]
        return torch.nn.functional.one_hot(torch.tensor(script[at] if at < 5 else 4), self.vocab_size) * 9.0


def test_text_is_put_into_tokens_together_with_what_comes_before() -> None:
    drafter = TextDrafter(TranslatedTarget(Writes(9), letters()), 6)
    # <s> c " a": "babba" follows. Alone it is b, ab, b, a; after "c a" too, because " a" stays a token
    tokens = drafter.propose([FakeSeq(0, [3, 4])], [Budget(6, 6)]).tokens.tolist()
    assert tokens == [4, 1, 2, 1, 0, 5]  # and the end
    # after "c" and "a", "ca" + "b..." would make "ab" of a committed token: the text is taken alone
    drafter.forget(FakeSeq(0, []))
    tokens = drafter.propose([FakeSeq(1, [3, 0])], [Budget(3, 3)]).tokens.tolist()
    assert tokens[:3] == [0, 1, 2]


def test_the_last_token_is_dropped_unless_the_text_ends() -> None:
    drafter = TextDrafter(TranslatedTarget(Writes(9), letters()), 6)
    tokens = drafter.propose([FakeSeq(0, [3, 4])], [Budget(1, 1)]).tokens.tolist()
    assert tokens == [4, 1]  # "ba" was drafted, and its "a" may yet become "ab"


def trained(folder: Path, kind: str) -> object:
    """A tokenizer of the real library, trained on this file."""
    tokenizers = pytest.importorskip("tokenizers")
    from forerun.models.load.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=kind == "metaspace"))
    special = ["<|end|>" if kind == "bytes" else "</s>"]
    if kind == "bytes":
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.Replace(MARK, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        )
        alphabet, special = [], [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900 if kind == "bytes" else 1200, special_tokens=special[:1], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train([__file__] if kind == "bytes" else [__file__, pytest.__file__], trainer)
    if len(special) > 1:
        backend.add_tokens(special[1:])
    return Tokenizer(backend, eos_ids=[backend.token_to_id(special[0])])


@pytest.mark.parametrize(("first", "second"), [("bytes", "metaspace"), ("metaspace", "bytes")])
def test_real_tokenizers_read_what_the_other_wrote(tmp_path: Path, first: str, second: str) -> None:
    ours, theirs = trained(tmp_path, first), trained(tmp_path, second)
    check_pair(ours, theirs, 'def f(x: int) -> str:  return "naïve café — 東京"\n    assert x')


def check_pair(ours: object, theirs: object, text: str) -> TokenMap:
    """What is read to the draft model is the same text, and most tokens correspond."""
    spellings = [
        Spelling.of(one.vocabulary(), one.special_ids(), one.eos_ids)  # type: ignore[attr-defined]
        for one in (ours, theirs)
    ]
    found = TokenMap.between(*spellings, ours.vocab_size, partial(ours.encode, add_special=False))  # type: ignore[attr-defined, misc, arg-type]
    ids = ours.encode(text, add_special=False)  # type: ignore[attr-defined]
    assert b"".join(spellings[0].pieces[i] for i in ids).decode() == text
    read = found.read(ids)
    assert b"".join(spellings[1].pieces[i] for i in read).decode() == text
    assert len(found.draft_ids) > 0.2 * min(len(spellings[0].pieces), len(spellings[1].pieces))
    assert {*found.ends.values()} & ours.eos_ids  # type: ignore[attr-defined]
    return found


def other_models() -> list[Path]:
    """Checkpoints that somebody has put beside the default one."""
    from forerun.models.load.catalog import cache_folder

    return sorted(path for path in (cache_folder() / "models").glob("*.gguf") if "smollm2" not in path.name.lower())


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("path", other_models() or [None], ids=lambda path: path and path.stem)
def test_real_models_of_other_families(smollm2_path: str, path: Path | None) -> None:
    if path is None:
        pytest.skip("there is no other model beside the default one")
    from forerun.models.load.checkpoint import open_checkpoint

    ours, theirs = open_checkpoint(smollm2_path).tokenizer(), open_checkpoint(str(path)).tokenizer()
    text = "The quick brown fox costs €3,50 — naïve, isn't it?\n\n    def f(x): return x  # 東京\n"
    for one, other in ((ours, theirs), (theirs, ours)):
        assert check_pair(one, other, text).ends
