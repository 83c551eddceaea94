"""What the chat templates of well-known families do, written out: roles, tools, thinking, dates.

Each is (template, special tokens: bos and eos first). Layout and conditions are those of the
released templates; long fixed instructions (how to call tools, knowledge dates) are shortened.
"""

# A default system prompt unless the conversation has one.
SMOLLM2 = (
    r"""
{%- for m in messages -%}
  {%- if loop.first and m.role != 'system' -%}
    {{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' -}}
  {%- endif -%}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""",
    ("<|im_start|>", "<|im_end|>"),
)

_QWEN_HISTORY = r"""
{%- macro calls(m) -%}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n' if m.content or not loop.first -}}
    {%- set f = call.function or call -%}
    {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' -}}
    {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}\n</tool_call>' -}}
  {%- endfor -%}
{%- endmacro -%}
{%- set first = messages[0] -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' + ((first.content + '\n\n') if first.role == 'system' else '') -}}
  {{- '# Tools\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools><|im_end|>\n' -}}
{%- elif first.role == 'system' -%}
  {{- '<|im_start|>system\n' + first.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(last_query=messages | length - 1, searching=true) -%}
{%- for m in messages[::-1] -%}
  {%- if ns.searching and m.role == 'user' -%}
    {%- set ns.searching = false -%}
    {%- set ns.last_query = messages | length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set content = m.content if m.content is string else '' -%}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' -%}
    {%- if not reasoning and '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last_query and KEEPS -%}
      {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {{- calls(m) + '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\n' -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- else -%}
    {{- 'OPENING' -}}
  {%- endif -%}
{%- endif -%}
"""

# A thinking block only behind the last question; the prompt leaves opening it to the model.
QWEN3 = (
    _QWEN_HISTORY.replace("KEEPS", "(loop.last or reasoning)").replace("OPENING", ""),
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>"),
)
# The prompt opens the thinking block itself.
QWEN3_5 = (
    _QWEN_HISTORY.replace("KEEPS", "true").replace("OPENING", r"<think>\n"),
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>"),
)

# A system message of its own making, with today's date.
LLAMA3 = (
    r"""
{{- bos_token -}}
{%- if not date_string is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{%- set has_system = messages[0].role == 'system' -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' -}}
{{- (messages[0].content | trim if has_system else '') + '<|eot_id|>' -}}
{%- for m in (messages[1:] if has_system else messages) -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}
      {{- raise_exception('This model only supports single tool-calls at once!') -}}
    {%- endif -%}
    {%- set f = m.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", ' -}}
    {{- '"parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' -}}
  {%- elif m.role in ('tool', 'ipython') -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim -}}
    {{- '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
""",
    ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
)

# The system text goes into the first question; roles must alternate.
GEMMA = (
    r"""
{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if system else messages) -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
  {{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
""",
    ("<bos>", "<end_of_turn>", "<start_of_turn>"),
)

# Channels; the last answer ends in <|return|>, earlier ones in <|end|> and without their analysis.
HARMONY = (
    r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') -}}
{{- '<|end|>' -}}
{%- for m in messages -%}
  {%- if m.role in ('system', 'developer') -%}
    {{- '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' -}}
  {%- elif m.role == 'user' -%}
    {{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' -}}
    {{- m.content | tojson + '<|end|>' -}}
  {%- elif m.tool_calls -%}
    {%- if m.thinking -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
    {%- endif -%}
    {%- set f = m.tool_calls[0].function -%}
    {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' -}}
    {{- f.arguments | tojson + '<|call|>' -}}
  {%- elif loop.last and not add_generation_prompt -%}
    {%- if m.thinking -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
  {%- else -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
""",
    (
        "<|startoftext|>",
        "<|return|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|call|>",
    ),
)

# No end-of-turn token: the next role ends a turn.
GLM = (
    r"""
{{- '[gMASK]<sop>' -}}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set off = enable_thinking is defined and not enable_thinking -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- '<|user|>\n' + m.content + ('/nothink' if off else '') -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- if loop.index0 > ns.last_user and m.reasoning_content -%}
      {{- '\n<think>' + m.reasoning_content.strip() + '</think>' -}}
    {%- else -%}
      {{- '\n<think></think>' -}}
    {%- endif -%}
    {{- '\n' + m.content.strip() if m.content.strip() else '' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
  {%- else -%}
    {{- '<|system|>\n' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' + ('\n<think></think>' if off else '') -}}
{%- endif -%}
""",
    ("<sop>", "<|user|>", "[gMASK]", "<|assistant|>", "<|system|>", "<|observation|>"),
)

# Tools before the system prompt, which has a default; a section of its own for calls.
KIMI = (
    r"""
{%- if tools -%}
  {{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if loop.first and m.role != 'system' -%}
    {{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' -}}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {{- '<|im_user|>user<|im_middle|>' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_assistant|>assistant<|im_middle|>' + (m.content or '') -}}
    {%- if m.tool_calls -%}
      {{- '<|tool_calls_section_begin|>' -}}
      {%- for call in m.tool_calls -%}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
        {{- (call.function.arguments if call.function.arguments is string
             else call.function.arguments | tojson) + '<|tool_call_end|>' -}}
      {%- endfor -%}
      {{- '<|tool_calls_section_end|>' -}}
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    {{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\n' + m.content -}}
  {%- else -%}
    {{- '<|im_system|>system<|im_middle|>' + m.content -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
""",
    (
        *("<|im_system|>", "<|im_end|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
)

WILD = {
    "smollm2": SMOLLM2,
    "qwen3": QWEN3,
    "qwen3.5": QWEN3_5,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "glm": GLM,
    "kimi": KIMI,
}
