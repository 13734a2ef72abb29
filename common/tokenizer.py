"""A word-level tokenizer for small models: one word, one token; an unknown word is an error.

It is a thin shell around a `tokenizers` WordLevel model, so that its `tokenizer.json` also loads with
`transformers.PreTrainedTokenizerFast`. Ids: `<pad>` 0, `<unk>` 1, `<end>` 2, then the words in the order
given. Masks never look at these values: they come from the spans the tokens were made in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from common.errors import ConfigError, nearest

PAD, UNK, END = "<pad>", "<unk>", "<end>"
SPECIALS = (PAD, UNK, END)
FILE_NAME = "tokenizer.json"
VOCAB_MULTIPLE = 8
"""Vocabularies are filled up to a multiple of this: matrix kernels like it."""


class WordTokenizer:
    """Text to token ids and back, split at white space. Example: `WordTokenizer.build(("at", "a1"))`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        missing = [special for special in SPECIALS if special not in vocabulary]
        if missing or sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ConfigError(
                f"not a word tokenizer: {'lacks ' + ', '.join(missing) if missing else 'ids have gaps'}; "
                "build it with WordTokenizer.build"
            )
        self._ids = vocabulary
        self._words = sorted(vocabulary, key=vocabulary.__getitem__)
        self.pad_id, self.unk_id, self.end_id = (vocabulary[special] for special in SPECIALS)
        self.vocab_size = len(vocabulary)

    @classmethod
    def build(cls, words: Iterable[str]) -> WordTokenizer:
        """A tokenizer of `words`; repeated words count once.

        Raises:
            ConfigError: a word is empty, holds white space, or is the name of a special token.
        """
        entries = list(SPECIALS)
        for word in dict.fromkeys(words):
            if word.split() != [word] or word in SPECIALS:
                raise ConfigError(f"{word!r} cannot be a word: it is empty, holds white space or is special")
            entries.append(word)
        fill = -len(entries) % VOCAB_MULTIPLE
        entries += [f"<fill{number}>" for number in range(fill)]
        vocabulary = {word: number for number, word in enumerate(entries)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> WordTokenizer:
        """Read `tokenizer.json`, or the one in the folder `path`.

        Raises:
            ConfigError: the file is missing, or is no word tokenizer.
        """
        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"there is no tokenizer at {file}; run the warm start, or name its folder")
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise ConfigError(f"{file} is not a tokenizer file: {error}") from error
        return cls(tokenizer)

    def save(self, path: Path) -> Path:
        """Write `tokenizer.json` (into the folder `path`, if it is one) and return the file."""
        file = path / FILE_NAME if path.is_dir() else path
        file.write_text(self.to_json(), encoding="utf-8")
        return file

    def to_json(self) -> str:
        """The file's contents; equal vocabularies give equal text."""
        return self._tokenizer.to_str(pretty=True)

    @property
    def sha256(self) -> str:
        """Hex digest of the file's contents: two processes agree on every id if it is equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids `[n]`, one for each word of `text`; `<end>` may be written as a word.

        Raises:
            ConfigError: a word is not in the vocabulary.
        """
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.unk_id in found:
            word = text.split()[found.index(self.unk_id)]
            raise ConfigError(
                f"{word!r} is not in the vocabulary of {self.vocab_size} words{nearest(word, self._ids)}; "
                "the tokenizer was built for another environment or another size of it"
            )
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The words of `token_ids` joined by spaces, without `<end>`.

        Other special tokens stay visible: a sampled `<pad>` or `<unk>` is no part of any valid action.
        """
        return " ".join(self._words[token] for token in token_ids if token != self.end_id)
