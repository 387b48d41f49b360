"""What a chat template is told."""

import pytest

from mars2_jax.errors import ConfigError
from mars2_jax.models.tokenizer import ChatTokenizer

# What Qwen3's does with the variable: "off" is an empty thought before the answer, the rest is left to the model.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def chat_tokenizer(template: str) -> ChatTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template)
    return ChatTokenizer(tokenizer, [tokenizer.eos_token_id])


@pytest.mark.parametrize(
    ("thinking", "end"),
    [("default", "<|assistant|>"), ("on", "<|assistant|>"), ("off", "<|assistant|><think></think>")],
)
def test_thinking_is_told_to_the_template(thinking, end):
    tokenizer = chat_tokenizer(THINKING).with_thinking(thinking, "agents.a.enable_thinking")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == f"<|system|>Be short.<|user|>Hi.{end}"


def test_a_template_that_does_not_ask_is_an_error_that_names_the_key():
    tokenizer = chat_tokenizer(PLAIN)
    assert tokenizer.with_thinking("default", "agents.a.enable_thinking") is tokenizer
    for thinking in ("on", "off"):
        with pytest.raises(ConfigError, match=f"config.agents.a.enable_thinking is '{thinking}', but .* set 'default'"):
            tokenizer.with_thinking(thinking, "agents.a.enable_thinking")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}", "<|end|>"),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}",
            "<|im_end|>",
        ),
        # Nothing behind an answer: the tokenizer's own end of sequence.
        (PLAIN, "<|im_end|>"),
    ],
)
def test_the_token_that_ends_an_answer_is_the_templates(template, end):
    tokenizer = chat_tokenizer(template).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|im_end|>")}
    assert ChatTokenizer(tokenizer, ids.values()).end_of_turn() == ids[end]
