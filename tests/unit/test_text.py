"""Text from tokens: pieces, stop strings, ends. Everything is decided token by token, so nothing can depend on blocks."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from orchestrator.completion import Completion, FinishReason
from orchestrator.detokenizer import Detokenizer, StopStrings
from orchestrator.request import GenerationPlan, is_known_id
from orchestrator.vocabulary import Vocabulary
from orchestrator.worker_stream import IncompatibleWorker
from tandem.acceptance import TokenKind
from tandem.model_info import token_strings, vocabulary_fingerprint
from tandem.sampling_limits import SAMPLING_VERSION
from tandem.v1 import sampling_pb2, worker_pb2
from tests.support.services import MODELS

TEXTS = [
    "plain words, and more of them",
    "日本語のテキスト と 한국어",
    "emoji \U0001f600\U0001f468‍\U0001f469‍\U0001f467 and combining é",
    "हिन्दी में कुछ शब्द",
    "\n\n  spaces\tand\r\nlines  ",
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(MODELS / "tiny-target"), "")


@pytest.fixture(scope="module")
def decode(vocabulary: Vocabulary) -> Callable[[Sequence[int]], str]:
    return vocabulary.decode


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_decoded_whole(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode_text(text)
    detokenizer = Detokenizer(vocabulary.decode)
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert "".join(pieces) == vocabulary.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_that_ends_inside_a_character_flushes_it(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode_text("ab\U0001f600")[:-1]
    assert vocabulary.decode(ids).endswith("\ufffd"), "the emoji must be several tokens for this test to mean anything"
    detokenizer = Detokenizer(vocabulary.decode)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, detokenizer.flush()]) == vocabulary.decode(ids)


@given(seed=st.integers(0, 2**32))
def test_any_ids_concatenate_to_the_decoded_whole(decode: Callable[[Sequence[int]], str], seed: int) -> None:
    generator = random.Random(seed)
    ids = [generator.randrange(300) for _ in range(generator.randrange(1, 40))]
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert "".join(pieces) == decode(ids)
    in_rounds, said, start = Detokenizer(decode), [], 0
    while start < len(ids):
        end = start + generator.randrange(1, 7)
        said += in_rounds.push_all(ids[start:end])
        start = end
    assert [*said, in_rounds.flush()] == pieces, "a token's text depends on the round that it came in"


@given(seed=st.integers(0, 2**32))
def test_bytes_of_no_character_concatenate_and_do_not_pile_up(
    decode: Callable[[Sequence[int]], str], seed: int
) -> None:
    """A token would cost as much as all those before it, and the caller would see no text before the end."""
    generator = random.Random(seed)
    parts = [token_id for token_id in range(512) if decode([token_id]) == "\ufffd"]
    assert len(parts) > 100
    detokenizer, pieces, longest = Detokenizer(decode), [], 0
    ids = [generator.choice(parts[: generator.choice((1, len(parts)))]) for _ in range(200)]
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        longest = max(longest, len(detokenizer._window))
    assert "".join([*pieces, detokenizer.flush()]) == decode(ids)
    assert longest < 80


def _llama_like(tokens: Sequence[str], chat_template: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece models have it: the bytes of unknown characters, spaces within the tokens, a BOS that it adds
    itself, and the first space left out of what is decoded. Its ids begin with <s>, </s>, <unk>."""
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", *tokens])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template or None,
    )


SENTENCE_PIECES = ["\u2581Hello", "\u2581world", "\u2581", "s", "!", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
EMOJI = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["\u2581Hello", "\u2581world", "s"], "Hello worlds"),
        (["s", "\u2581world"], "s world"),
        (["\u2581", "\u2581", "\u2581Hello"], "  Hello"),
        (["\u2581Hello", *EMOJI, "\u2581world"], "Hello\U0001f600 world"),
        ([*EMOJI, "\u2581", "!", "\u2581"], "\U0001f600 ! "),
        (["\u2581Hello", "\u2581world", *EMOJI[:3]], "Hello world\ufffd\ufffd\ufffd"),
    ],
)
def test_words_of_a_sentencepiece_tokenizer_keep_their_spaces(tokens: list[str], text: str) -> None:
    tokenizer = _llama_like(SENTENCE_PIECES)
    vocabulary = Vocabulary(tokenizer, {})
    ids: list[int] = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.decode(ids) == vocabulary.decode(ids) == text
    assert "".join(vocabulary.decode([token_id]) for token_id in ids) != text, "what this test is there to tell apart"
    detokenizer = Detokenizer(vocabulary.decode)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, detokenizer.flush()]) == text


def test_any_few_tokens_of_a_sentencepiece_tokenizer_concatenate_to_the_decoded_whole() -> None:
    vocabulary = Vocabulary(_llama_like(SENTENCE_PIECES), {})
    for ids in itertools.product(range(3, 3 + len(SENTENCE_PIECES)), repeat=3):
        detokenizer = Detokenizer(vocabulary.decode)
        pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
        assert "".join(pieces) == vocabulary.decode(ids), ids


def test_tokens_without_text_cost_no_more_the_more_there_are() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return "".join(chr(token_id) for token_id in ids if token_id)

    detokenizer = Detokenizer(decode)
    ids = [ord("a"), *[0] * 1000, ord("b"), 0, ord("c")]
    assert "".join([detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]) == "abc"
    assert max(sizes) < 50


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("a", True),
        ("a.B_c:d-9", True),
        ("a#7", True),
        ("", False),
        ("a b", False),
        ("a#", False),
        ("a\nb", False),
        ("a" * 129, False),
    ],
)
def test_what_a_request_may_be_known_by(text: str, known: bool) -> None:
    assert is_known_id(text) is known


def _run_stops(stops: Sequence[str], pieces: Sequence[str], include: bool = False) -> tuple[str, bool, list[str]]:
    matcher, sent = StopStrings(stops, include), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent.append(text)
        if stopped:
            return "".join(sent), True, sent
    sent.append(matcher.flush())
    return "".join(sent), False, sent


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["DEF"], ["AB", "CD", "EF", "G"], "ABC"),
        (["DEFGHIX"], ["AB", "CD", "EF", "GH", "IJ"], "ABCDEFGHIJ"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["bcd", "c"], ["ab", "cd"], "ab"),
        (["xyz", "b"], ["a", "b", "xyz"], "a"),
        (["aab"], ["aa", "a", "b"], "a"),
    ],
)
def test_the_first_completed_stop_ends_the_text(stops: list[str], pieces: list[str], expected: str) -> None:
    text, _, _ = _run_stops(stops, pieces)
    assert text == expected


def test_an_included_stop_string_is_part_of_the_text() -> None:
    assert _run_stops(["DEF"], ["ABCD", "EFG"], include=True)[:2] == ("ABCDEF", True)


def test_held_text_goes_out_as_soon_as_it_cannot_match() -> None:
    _, _, sent = _run_stops(["DEFX"], ["ABCDE", "F", "G"])
    assert sent == ["ABC", "", "DEFG", ""]


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert _run_stops(stops, pieces)[:2] == _run_stops(stops, list(text))[:2]


def _plan(**changes: object) -> GenerationPlan:
    values: dict[str, object] = {
        "request_id": "r",
        "prompt": b"",
        "prompt_tokens": 0,
        "sampling": sampling_pb2.Sampling(),
        "num_speculative_tokens": 5,
        "adaptive": False,
        "max_tokens": 100,
        "min_tokens": 0,
        "end_token_ids": frozenset(),
        "stop": (),
        "include_stop": False,
        "cache_salt": "",
    }
    return GenerationPlan(**{**values, **changes})  # type: ignore[arg-type]


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in ids)


def _complete(plan: GenerationPlan, text: str, block: int) -> tuple[str, str, FinishReason | None]:
    completion = Completion(plan, _letters)
    emitted = []
    for start in range(0, len(text), block):
        ids = [ord(letter) for letter in text[start : start + block]]
        goes_on = not completion.may_end_in(ids)
        taken = completion.take(ids, [TokenKind.ACCEPTED] * len(ids))
        emitted += taken
        assert not goes_on or (len(taken) == len(ids) and completion.finish_reason is None)
        if completion.finish_reason is not None:
            break
    return _letters([t.token_id for t in emitted]), "".join(t.text for t in emitted), completion.finish_reason


@pytest.mark.parametrize("block", [1, 2, 3, 6, 9])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"end_token_ids": frozenset({ord("d")})}, ("abcd", "abcd", FinishReason.STOP)),
        ({"end_token_ids": frozenset({ord("d")}), "min_tokens": 3}, ("abcd", "abcd", FinishReason.STOP)),
        ({"max_tokens": 4}, ("abcd", "abcd", FinishReason.LENGTH)),
        ({"stop": ("cd",)}, ("abcd", "ab", FinishReason.STOP)),
        ({"stop": ("cd",), "include_stop": True}, ("abcd", "abcd", FinishReason.STOP)),
        ({"stop": ("b", "f"), "min_tokens": 2}, ("abcdef", "abcde", FinishReason.STOP)),
        ({"stop": ("hX",), "max_tokens": 8}, ("abcdefgh", "abcdefgh", FinishReason.LENGTH)),
        ({"stop": ("d",), "max_tokens": 4}, ("abcd", "abc", FinishReason.STOP)),
        ({"stop": ("c",), "end_token_ids": frozenset({ord("b")})}, ("ab", "ab", FinishReason.STOP)),
    ],
)
def test_the_first_end_wins_wherever_the_blocks_lie(
    block: int, changes: dict[str, object], expected: tuple[str, str, FinishReason]
) -> None:
    assert _complete(_plan(**changes), "abcdefghij", block) == expected


def test_tokens_that_end_nothing_are_known_without_their_text() -> None:
    completion = Completion(_plan(max_tokens=4, end_token_ids=frozenset({ord("d")})), _letters)
    assert not completion.may_end_in([ord("a")] * 3)
    assert completion.may_end_in([ord("a")] * 4)
    assert completion.may_end_in([ord("d")])
    completion.take([ord("a")], [TokenKind.ACCEPTED])
    assert completion.may_end_in([ord("a")] * 3)
    assert Completion(_plan(stop=("xyz",)), _letters).may_end_in([ord("a")])


def test_one_bos_at_most() -> None:
    class Tokenizer:
        all_special_tokens: Sequence[str] = ("<s>",)
        bos_token_id = 0
        eos_token_id = 1
        chat_template = None

        def __len__(self) -> int:
            return 3

        def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
            return [["<s>", "</s>", "a"][token_id] for token_id in ids]

        def get_vocab(self) -> dict[str, int]:
            return {"<s>": 0, "</s>": 1, "a": 2}

        def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
            return {"input_ids": [0, *([0] if text.startswith("<s>") else []), 2]}

    vocabulary = Vocabulary(Tokenizer(), {"eos_token_id": [1, 2]})
    assert vocabulary.encode_text("<s>a") == vocabulary.encode_text("a") == [0, 2]
    assert vocabulary.end_token_ids == {1, 2}


TURNS = "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}{% endfor %}"


def test_a_chat_begins_with_one_bos_whatever_its_messages_hold() -> None:
    """The template writes one, the tokenizer would add another, and a message's own is plain text."""
    vocabulary = Vocabulary(_llama_like([*"abersu:<>"], TURNS), {})
    (bos,) = vocabulary.encode_text("<s>")[:1]
    plain = vocabulary.encode_chat([("user", "ab")])
    assert vocabulary.decode_all(plain) == "<s>user:ab"
    for content in ("<s>ab", "a<s>b", "a<s>", "<s>"):
        attacked = vocabulary.encode_chat([("user", content), ("user", "ab")])
        assert vocabulary.decode_all(attacked) == f"<s>user:{content}user:ab"
        for ids in (plain, attacked):
            assert [index for index, token_id in enumerate(ids) if token_id == bos] == [0]
    assert vocabulary.encode_text("<s>ab") == vocabulary.encode_text("ab") == [bos, *vocabulary.encode_text("ab")[1:]]


@pytest.mark.parametrize("value", ["0.7", [0.7], {}])
def test_defaults_of_the_model_that_are_no_numbers_are_refused_in_words(value: object) -> None:
    with pytest.raises(ValueError, match="generation config: temperature is no number"):
        Vocabulary(_llama_like(["a"]), {"temperature": value})


def test_threads_that_encode_at_once_read_special_token_text_each_their_own_way() -> None:
    """How it is read is a state of the tokenizer underneath: one that both shared gave some of them the other's reading."""
    vocabulary = Vocabulary(_llama_like([*"abersu:<>"], TURNS), {})
    conversations = [[("user", "ab" * 50)], [("user", "<s>ab" * 20)]]
    alone = [vocabulary.encode_chat(each) for each in conversations]

    def wrong(index: int) -> int:
        return sum(vocabulary.encode_chat(conversations[index]) != alone[index] for _ in range(1500))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(wrong, (0, 1))) == [0, 0]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("generation_config", "ends"),
    [
        ({"eos_token_id": [2]}, {1, 2}),
        ({"eos_token_id": 2}, {1, 2}),
        ({"eos_token_id": [1, 2]}, {1, 2}),
        ({"eos_token_id": None}, {1}),
        ({}, {1}),
    ],
)
def test_the_end_tokens_are_those_of_the_generation_config_and_of_the_tokenizer(
    generation_config: dict[str, object], ends: set[int]
) -> None:
    assert Vocabulary(_llama_like(["a"]), generation_config).end_token_ids == ends


def _info(strings: Sequence[str], **others: object) -> worker_pb2.GetModelInfoResponse:
    """How a worker whose model has these tokens describes itself."""
    fields = {"vocabulary_size": len(strings), "vocabulary_fingerprint": vocabulary_fingerprint(strings)}
    return worker_pb2.GetModelInfoResponse(model="m", sampling_version=SAMPLING_VERSION, **{**fields, **others})  # type: ignore[arg-type]


def test_a_draft_may_know_the_first_of_the_tokens_only(vocabulary: Vocabulary) -> None:
    strings = token_strings(vocabulary._tokenizer)
    for known in (strings, strings[:400], strings[:1]):
        vocabulary.check_draft(_info(known))
    for wrong, why in (
        (_info([*strings, "more"]), "has 513 tokens, the tokenizer 512"),
        (_info([*strings[:399], "other"]), "has other token strings"),
        (_info(strings[1:401]), "has other token strings"),
        (_info(strings[:400], vocabulary_size=401), "has other token strings"),
        (_info(strings, vocabulary_fingerprint=b""), "has other token strings"),
    ):
        with pytest.raises(IncompatibleWorker, match=why):
            vocabulary.check_draft(wrong)


def test_special_token_text_in_a_message_is_plain_text(vocabulary: Vocabulary) -> None:
    plain = vocabulary.encode_chat([("user", "hello")])
    specials = {vocabulary.encode_text(text)[0] for text in vocabulary._special_strings}
    attack = vocabulary._special_strings[-1]
    attacked = vocabulary.encode_chat([("user", f"hello{attack}")])
    assert [i for i in plain if i in specials] == [i for i in attacked if i in specials]
    assert len(attacked) > len(plain)
    assert attack in vocabulary._tokenizer.decode(attacked)
