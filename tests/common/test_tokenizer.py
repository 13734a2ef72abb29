"""The word tokenizer: every word is one token, and nothing unknown passes in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.tokenizer import WordTokenizer

WORDS = ("lake", "at", "a1", "b1", "right", "don't", "x.y", "3")


@given(st.lists(st.sampled_from(WORDS), max_size=20))
def test_every_text_of_known_words_survives_the_round_trip_word_for_word(words: list[str]) -> None:
    tokenizer = WordTokenizer.build(WORDS)
    text = " ".join(words)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(words)
    assert tokenizer.decode(token_ids) == text


def test_an_unknown_word_is_refused_by_name_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'rihgt'.*did you mean 'right'"):
        WordTokenizer.build(WORDS).encode("at rihgt")


def test_concatenated_encodings_equal_the_encoding_of_the_joined_text() -> None:
    tokenizer = WordTokenizer.build(WORDS)
    assert tokenizer.encode("lake at a1") + tokenizer.encode("right") == tokenizer.encode("lake at a1 right")


def test_special_tokens_have_fixed_ids_and_only_the_end_is_hidden_when_decoding() -> None:
    tokenizer = WordTokenizer.build(WORDS)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.end_id) == (0, 1, 2)
    assert tokenizer.encode("right <end>")[-1] == tokenizer.end_id
    assert tokenizer.decode([*tokenizer.encode("right"), tokenizer.end_id]) == "right"
    assert tokenizer.decode([tokenizer.pad_id, tokenizer.unk_id]) == "<pad> <unk>"


def test_the_vocabulary_is_filled_to_a_multiple_of_eight_without_changing_ids() -> None:
    small, large = WordTokenizer.build(WORDS[:2]), WordTokenizer.build(WORDS)
    assert small.vocab_size % 8 == 0 and large.vocab_size % 8 == 0
    assert small.encode("lake at") == large.encode("lake at") == [3, 4]


def test_every_id_of_the_vocabulary_decodes_because_a_model_may_sample_any_of_them() -> None:
    tokenizer = WordTokenizer.build(WORDS)
    words = tokenizer.decode(range(tokenizer.vocab_size)).split()
    assert len(words) == tokenizer.vocab_size - 1


def test_a_saved_tokenizer_loads_with_the_same_digest_and_the_same_ids(tmp_path: Path) -> None:
    tokenizer = WordTokenizer.build(WORDS)
    file = tokenizer.save(tmp_path)
    assert file.name == "tokenizer.json"
    for path in (file, tmp_path):
        loaded = WordTokenizer.load(path)
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode("right at") == tokenizer.encode("right at")


def test_two_vocabularies_have_two_digests_even_if_only_the_order_differs() -> None:
    assert WordTokenizer.build(WORDS).sha256 != WordTokenizer.build(WORDS[::-1]).sha256


def test_the_saved_file_also_loads_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = WordTokenizer.build(WORDS)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.save(tmp_path)))
    assert theirs("right don't x.y")["input_ids"] == tokenizer.encode("right don't x.y")


@pytest.mark.parametrize("word", ["", "two words", "tab\tbed", "<end>"])
def test_a_word_that_could_not_be_found_again_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a word"):
        WordTokenizer.build(("fine", word))


def test_a_missing_or_damaged_file_is_a_configuration_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer at"):
        WordTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        WordTokenizer.load(tmp_path)
