"""Chat templates written out, and small byte-level tokenizers that carry them."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The same text, with the assistant's part marked by the template itself.
CHATML_TAGGED = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{% for m in messages %}"
    "{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No generation prompt at all: the answer follows the instruction.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles\nare supported') }}{% endif %}"
    "{% endfor %}"
)

# What Qwen3's template does: a think block in answers after the last user turn, none in earlier
# ones, and an empty one in the generation prompt without thinking.
QWEN3 = r"""
{%- set ns = namespace(last_query=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- set reasoning = m.reasoning_content | default('') -%}
  {%- if m.role == 'assistant' and loop.index0 > ns.last_query and (loop.last or reasoning) -%}
    {{- '<think>\n' + reasoning + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""

_SPECIAL = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    CHATML_TAGGED: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    MISTRAL: ("<s>", "</s>"),
    QWEN3: ("<|im_start|>", "<|im_end|>"),
}


def chat_tokenizer(
    template: str | None,
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] | None = None,
) -> PreTrainedTokenizerFast:
    """One token a byte, one for each merged pair ("Ċ" is the newline), one for each special token.

    The first special token is bos, the second eos; "<|mask|>" is special too.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + ["".join(pair) for pair in merges]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    bos, eos, *others = special or _SPECIAL.get(template, _SPECIAL[CHATML])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        extra_special_tokens=[*others, "<|mask|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant messages in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
