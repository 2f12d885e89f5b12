"""Small chat templates, each with features that published ones use, written for this corpus.

Names tell the features. What the templates write is of no matter; that it is what transformers writes, is.
"""

from __future__ import annotations

from typing import Final

_LOOP = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{%- if c.function %}{% set c = c.function %}{% endif %}<call>CALL</call>{% endfor %}{% endfor %}" + _OPEN
)


def _calls(text: str) -> str:
    return _TOOLS + _CALLS.replace("CALL", text)


def _of_call(text: str) -> str:
    """A template that reads the whole call, not its function alone."""
    return (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['tool_calls'] is defined %}{% for tool in m['tool_calls'] %}"
        + text
        + "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )


TEMPLATES: Final[dict[str, str]] = {
    # Variables, defined and not.
    "chatml": _LOOP + _OPEN,
    "begin and end tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "each special token": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token }}|"
    "{{ cls_token }}|{{ mask_token }}|{{ messages[0].content }}",
    "special tokens of the model's own": "{{ image_token }}|{{ boi_token }}|{{ think_token }}|"
    "{{ messages[0].content }}",
    "is a special token defined": "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% if pad_token is not defined %}no pad{% endif %}{{ messages[-1]['content'] }}",
    "tools are always defined": "{% if tools is defined %}defined{% endif %}{% if tools is none %} none{% endif %}"
    "{% if documents is defined %} documents{% endif %}{% if documents is none %} none{% endif %}",
    "tools by not none": "{%- if tools is not none %}{{ tools | length }} tools{% endif %}" + _LOOP,
    "unknown variable printed": "<{{ nothing }}>" + _LOOP,
    "unknown variable's attribute": "<{{ nothing.more }}>" + _LOOP,
    "unknown variable's attribute, guarded": "<{{ nothing.more if nothing is defined else 'none' }}>" + _LOOP,
    "default filter": "{{ nothing | default('fallback') }}{{ mood | default('calm', true) }}" + _LOOP,
    "set if not defined": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}" + _LOOP + _OPEN,
    "set if thinking": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}" + _LOOP,
    "reads reasoning_effort": "Reasoning: {{ reasoning_effort | default('medium') }}\n" + _LOOP + _OPEN,
    "prompt's begin is negated": _LOOP + "{% if not add_generation_prompt %}(closed){% endif %}",
    "compares booleans": "{% if add_generation_prompt == true %}yes{% else %}no{% endif %}" + _LOOP,
    # Tools and JSON.
    "tojson": _TOOLS + _LOOP + _OPEN,
    "tojson without ASCII": "{% if tools %}{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}{% endfor %}"
    "{% endif %}"
    + _LOOP,
    "tojson in ASCII": "{% if tools %}{{ tools | tojson(ensure_ascii=true) }}{% endif %}" + _LOOP,
    "tojson by position": "{% if tools %}{{ tools | tojson(false, 2) }}{% endif %}" + _LOOP,
    "tojson with indent": "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}" + _LOOP,
    "tojson with separators": "{% if tools %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}" + _LOOP,
    "tojson sorted": "{% if tools %}{{ tools | tojson(sort_keys=true, ensure_ascii=false) }}{% endif %}" + _LOOP,
    "tojson with an option that is none": "{% if tools %}{{ tools | tojson(default=1) }}{% endif %}" + _LOOP,
    "tojson of text": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "tojson of nothing": "{{ nothing | tojson }}",
    "tools in words": "{% if tools %}{% for t in tools %}{{ t.function.name }}({% for n, p in "
    "t.function.parameters.properties.items() %}{{ n }}: {{ p.type }}{{ ', ' if not loop.last }}{% endfor %}): "
    "{{ t.function.description | default('-') }}\n{% endfor %}{% endif %}" + _LOOP,
    "items filter on schemas": "{% if tools %}{% for n, p in tools[0].function.parameters | items %}{{ n }}={{ p }};"
    "{% endfor %}{% endif %}" + _LOOP,
    "documents": "{% if documents %}{% for d in documents %}[{{ loop.index }}] {{ d['title'] }}: {{ d['text'] }}\n"
    "{% endfor %}{% endif %}" + _LOOP,
    # Calls of earlier turns.
    "arguments as JSON of an object": _calls('{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'),
    "arguments of either form": _calls(
        "{{ c.name }}{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}"
    ),
    "arguments as elements": _calls("{{ c.name }}{% for k, v in c.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"),
    "arguments through the items filter": _calls(
        "<function={{ c.name }}>{% for k, v in c.arguments | items %}<parameter={{ k }}>{{ v if v is string else "
        "v | tojson(ensure_ascii=False) }}</parameter>{% endfor %}</function>"
    ),
    "arguments joined as text": _of_call("{{ '<call>' + tool['function']['name'] + tool['function']['arguments'] }}"),
    "arguments joined with a tilde": _of_call("{{ tool.function.name ~ ':' ~ tool.function.arguments }}"),
    "arguments printed": _of_call("{{ tool.function.name }}({{ tool.function.arguments }})"),
    "arguments must be an object": _of_call(
        "{% if tool.function.arguments is not mapping %}{{ raise_exception('arguments must be an object') }}{% endif %}"
        "{{ tool.function.arguments.city }}"
    ),
    "arguments must be text": _of_call(
        "{% if tool.function.arguments is not string %}{{ raise_exception('arguments must be text') }}{% endif %}"
        "{{ tool.function.arguments }}"
    ),
    "ids of nine characters": _of_call(
        "{% if tool.id is not defined or tool.id | length != 9 %}{{ raise_exception('ids of calls must have nine "
        "characters') }}{% endif %}{{ tool.function.arguments | tojson }}#{{ tool.id }}"
    ),
    "ids of nine characters, in text": _of_call(
        "{% if tool.id | length != 9 %}{{ raise_exception('ids of calls must have nine characters') }}{% endif %}"
        "{{ '[CALL]' + tool.function.arguments + tool.id }}"
    ),
    "null content beside calls": "{% for m in messages %}{% if m['content'] is none %}(none){% elif m.content is not "
    "defined %}(undefined){% else %}{{ m['content'] }}{% endif %}{% endfor %}",
    "content joined as text": "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}",
    "content trimmed": "{% for m in messages %}{{ m['content'] | trim }}/{{ m.content.strip() }}{% endfor %}",
    "calls only where content is null": "{% for m in messages %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for tool in m['tool_calls'] %}{{ tool['function']['name'] + tool['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}",
    "content test by truth": "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}(empty){% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | length }} calls{% endif %}{% endfor %}",
    "result of a call": "{% for m in messages %}{% if m.role == 'tool' %}<result id={{ m.tool_call_id }} of="
    "{{ m.name }}>"
    "{{ m.content }}</result>{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "results in a row": "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1]"
    ".role != 'tool' %}<results>{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "</results>{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    # Reasoning.
    "reasoning_content": "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}",
    "thinking": "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content }}"
    "{% endfor %}",
    "thoughts, content and calls are too much": "{% for m in messages %}"
    "{% if m.thinking and m.content and m.tool_calls %}"
    "{{ raise_exception('thoughts or content beside calls, not both') }}{% endif %}{{ m.thinking or m.content }}"
    "{% endfor %}",
    "reasoning cut from content": "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c }}{% endfor %}",
    # Contents of parts.
    "parts of text": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}|{% endif %}{% endfor %}{% endif %}{% endfor %}",
    "parts alone": "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "{% endfor %}",
    "parts by index": "{% for m in messages %}{{ m.role }}{% if m['content'][0]['type'] == 'image' %}:{% endif %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}",
    "parts by filter": "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %}{% endfor %}",
    "parts in a macro": "{% macro show(content) %}{% if content is string %}{{ content }}"
    "{% elif content is iterable and "
    "content is not mapping %}{% for p in content %}{% if 'text' in p %}{{ p.text }}{% elif p.type == 'image' %}<image>"
    "{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}{% for m in messages %}"
    "{{ show(m.content) }}"
    "{% endfor %}",
    "first part": "{% for m in messages %}{% if m.content is not string %}{{ m.content[0].text }}{% else %}"
    "{{ m.content }}"
    "{% endif %}{% endfor %}",
    # The language.
    "macro with defaults": "{% macro turn(role, text='', end='<|im_end|>') %}{{ role }}:{{ text }}{{ end }}"
    "{% endmacro %}"
    "{% for m in messages %}{{ turn(m.role, m.content) }}{{ turn('x', end='!') }}{% endfor %}",
    "macro with caller": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% for m in messages %}{% call box() %}"
    "{{ m.content }}{% endcall %}{% endfor %}",
    "recursive macro": "{% macro schema(s, d) %}{{ s.type }}{% if s.properties and d < 5 %}{% for k, v in "
    "s.properties.items() %}<{{ k }}>{{ schema(v, d + 1) }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for t in tools or [] %}{{ schema(t.function.parameters, 0) }}{% endfor %}" + _LOOP,
    "namespace": "{% set ns = namespace(last='', n=0, found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = m.content %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}:{{ ns.last }}",
    "namespace with an underscore": "{% set ns = namespace(_n=0) %}" + _LOOP,
    "dict": "{% set d = dict(a=1, b='x') %}{{ d.a }}{{ d | tojson }}" + _LOOP,
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index > 3 %}"
    "{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "generation block with a set inside": "{% for m in messages %}{% set w = 'a' %}{% generation %}{% set w = 'b' %}"
    "{{ w }}{{ m.content }}{% endgeneration %}{{ w }}{% endfor %}",
    "generation block with line cuts": "{%- for m in messages %}\n  {%- generation -%}\n  {{ m.content }}\n"
    "  {%- endgeneration %}\n{%- endfor %}",
    "dates": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}" + _LOOP,
    "dates of a given day": "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "Today: {{ date_string }}\n" + _LOOP,
    "date in a wrong form": "{{ strftime_now(5) }}" + _LOOP,
    "trimmed blocks": "{%- for m in messages -%}\n    {%- if m.role -%}\n    {{- m.content -}}\n    {% endif %}\n"
    "{% endfor %}\n",
    "leading blanks": "   {% if true %}\n  {{ messages[0].content }}\n   {% endif %}\n\n",
    "comment": "{# what this does #}{{ messages[0].content }}{#- and more -#}",
    "raw": "{% raw %}{{ not Jinja }}{% endraw %}{{ messages[0].content }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages[0].content | upper | replace('A', 'b') }}"
    "{{ messages | length }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages[0].content | title | indent(2) | safe }}{{ [3, 1, 2] | sort | last }}",
    "escaping": "{{ messages[0].content }}{{ '<b>' | escape }}{{ messages[0].content | e }}",
    "text methods": "{% for m in messages %}{% set c = m.content %}{{ c.split('a') }}{{ c.startswith('H') }}"
    "{{ c.replace('l', 'L') }}{{ c[1:3] }}{{ c[::-1] }}{{ '%s!' % c }}{{ '{}?'.format(c) }}{% endfor %}",
    "slices and tests": "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{{ rest | length }}"
    "{{ messages[0] is mapping }}{{ messages is sequence }}{{ 3 is divisibleby 3 }}{{ 'a' in 'abc' }}",
    "reversed": "{% for m in messages[::-1] %}{{ loop.revindex }}{{ loop.previtem is defined }}{{ m.content }}"
    "{% endfor %}"
    "{% for m in messages | reverse %}{{ m.role }}{% endfor %}",
    "loop cycles": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% else %}empty"
    "{% endfor %}",
    "with and filter blocks": "{% with x = 1 %}{{ x }}{% endwith %}{% filter upper %}{{ messages[0].content }}"
    "{% endfilter %}",
    "block set": "{% set text %}<{{ messages[0].content }}>{% endset %}{{ text }}{{ text | length }}",
    "numbers": "{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 10 }}{{ 1 / 3 | round(2) }}{{ (1 / 3) | round(2) }}{{ 5 % 3 }}" + _LOOP,
    "range": "{% for i in range(0, messages | length, 2) %}{{ messages[i].content }}{% endfor %}",
    "special tokens in the text": "<|im_start|>{{ messages[0].content }}<|im_end|><|end|><|extra|>text",
    # Refusals, deliberate and not.
    "refuses a system message": "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}" + _LOOP,
    "refuses turns that do not alternate": "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ m.content }}"
    "{% endfor %}",
    "refuses roles": "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' "
    "~ m.role) }}{% endif %}{{ m.content }}{% endfor %}",
    "refuses everything": "{{ raise_exception('never') }}",
    "divides by zero": "{{ 1 / 0 }}",
    "reads beyond the list": "{{ messages[99].content }}",
    "unknown filter": "{{ messages | nosuchfilter }}",
    "not Jinja": "{% for m in messages %}{{ m.content }",
    "includes a file": "{% include 'chat.jinja' %}",
    "reaches for Python": "{{ messages.__class__.__mro__ }}",
    "changes a list": "{{ messages.append(1) }}",
    "joins what cannot be joined": "{{ messages[0].content + 1 }}",
    "ranges too far": "{% for i in range(10000000) %}{% endfor %}",
}  # fmt: skip
