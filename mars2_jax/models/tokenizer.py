"""Tokenizers: a folder's own through transformers, or built from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from mars2_jax.errors import ConfigError, ModelError
from mars2_jax.models.files import Checkpoint, GGUFCheckpoint

__all__ = ["ChatTokenizer", "load_tokenizer"]


class ChatTokenizer:
    """Chat messages to token ids and token ids to text.

    Args:
      tokenizer: a `transformers` tokenizer with a chat template.
      stop_ids: ids that end a response.
      variables: what the chat template is told beside the messages.
    """

    def __init__(self, tokenizer, stop_ids: Sequence[int], variables: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.variables = dict(variables or {})

    def with_thinking(self, thinking: str, key: str) -> ChatTokenizer:
        """This tokenizer with the template variable `enable_thinking` (Qwen3's) set.

        Args:
          thinking: "on", "off", or "default", which leaves the choice to the template.
          key: the config key that says so, for messages.

        Raises:
          ConfigError: the template makes the same prompt of both.
        """
        if thinking == "default":
            return self
        on, off = (ChatTokenizer(self.tokenizer, self.stop_ids, {"enable_thinking": x}) for x in (True, False))
        message = [{"role": "user", "content": "Hello."}]
        if np.array_equal(on.encode_chat(message), off.encode_chat(message)):
            raise ConfigError(
                f"config.{key} is {thinking!r}, but the model's chat template knows no enable_thinking: set 'default'"
            )
        return on if thinking == "on" else off

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """int32[P]: the messages under the model's chat template, up to where the answer begins."""
        ids = self._apply(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return np.asarray(ids, np.int32)

    def end_of_turn(self) -> int:
        """The id that ends an answer: the first of `stop_ids` that the chat template puts after one, else the
        tokenizer's end of sequence."""
        answer = "ANSWER"
        messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": answer}]
        rest = self._apply(messages, add_generation_prompt=False, tokenize=False).rpartition(answer)[2]
        after = (int(token) for token in self.encode(rest) if int(token) in self.stop_ids)
        end = self.tokenizer.eos_token_id
        return next(after, self.stop_ids[0] if end is None else int(end))

    def _apply(self, messages: Sequence[Mapping[str, str]], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **how, **self.variables)
        except jinja2.TemplateError as e:
            raise ModelError(
                f"the chat template refuses the messages ({e}): if it knows no system role, set "
                "config.agents.<name>.role=''"
            ) from e

    def encode(self, text: str) -> np.ndarray:
        """int32[P]: plain text, no special tokens added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of a response, special tokens left out."""
        return self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)


def load_tokenizer(checkpoint: Checkpoint, folder: str) -> ChatTokenizer:
    """The tokenizer of an open checkpoint; `folder` is where a checkpoint in Hugging Face layout lies.

    Raises:
      ModelError: no tokenizer, no chat template, or a kind of tokenizer that is not supported.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        tokenizer = _from_gguf(checkpoint.fields)
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as e:
            raise ModelError(f"no usable tokenizer in {folder}: {str(e).splitlines()[0]}") from e
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of {folder} has no chat template: use an instruction-tuned checkpoint")
    return ChatTokenizer(tokenizer, _stop_ids(tokenizer, folder))


def _stop_ids(tokenizer, folder: str) -> list[int]:
    """The end-of-sequence token and whatever ends a turn in the usual chat templates."""
    known = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
    vocab = tokenizer.get_vocab()
    ids = [vocab[t] for t in known if t in vocab]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(f"the tokenizer of {folder} has no end-of-sequence token")
    return ids


def _from_gguf(fields: Mapping[str, Any]):
    """Byte-level BPE from GGUF metadata, as llama.cpp's converters write it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    needed = ("model", "tokens", "token_type", "merges")
    if missing := [name for name in needed if f"tokenizer.ggml.{name}" not in fields]:
        raise ModelError(f"the GGUF file holds no usable tokenizer: it lacks tokenizer.ggml.{missing[0]}")
    if (kind := fields.get("tokenizer.ggml.model")) != "gpt2":
        raise ModelError(f"tokenizer kind {kind!r} in a GGUF file is not supported (byte-level BPE, 'gpt2', is)")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    pre = fields.get("tokenizer.ggml.pre")
    # Llama 3 takes a word that is a token as it is, even where the merges would not lead to it.
    model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    inner = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match pre:
        case "smollm":
            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        case "qwen2" | "llama-bpe":
            digits = r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}"
            split = (
                rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
            )
            if pre == "qwen2":
                inner.normalizer = normalizers.NFC()
        case other:
            raise ModelError(f"pre-tokenizer {other!r} in a GGUF file is not supported (smollm, qwen2, llama-bpe are)")
    inner.decoder = decoders.ByteLevel()
    control = 3  # the token type of llama.cpp's CONTROL
    specials = [t for t, kind in zip(tokens, types, strict=True) if kind == control]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    named = {}
    for ours, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            named[ours] = tokens[token_id]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
