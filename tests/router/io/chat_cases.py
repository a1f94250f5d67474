"""Chat templates and chat requests that between them use what templates and clients use."""

import json
from pathlib import Path
from typing import Any

from sgl_vertumnus.demo.tokenizer_files import byte_tokenizer

CONTEXT_TOKENS = 8192

#: The template of SmolLM2-Instruct.
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: Tools, their calls and results, loop controls, namespaces, a tag for training, whitespace.
TOOLS = """{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}<|im_start|>system
{{ ns.system }}
{%- if tools %}

# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{{- tools | tojson(indent=2) }}
{%- endif %}
<|im_end|>
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role not in ['user', 'assistant', 'tool', 'developer'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    <|im_start|>{{ message.role }}
    {% if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }} {{ call | tojson }}</call>
        {%- endfor %}
        {%- if message.reasoning_content is defined %}[{{ message.reasoning_content }}]{% endif %}
    {%- elif message.role == 'tool' %}
        {{- message.tool_call_id }} {{ message.name }}: {{ message.content }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}
{%- if reasoning_effort is defined %}<effort {{ reasoning_effort }}>{% endif %}
{%- if style %}<style {{ style | tojson }}>{% endif %}
{%- endif %}
{{- strftime_now('%Y') }}"""

#: Walks over content parts, so contents are kept as lists.
PARTS = """{% for message in messages %}<|im_start|>{{ message['role'] }}:
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}[{{ part['type'] }}|{{ part['text'] }}]{% endfor %}
{%- endif %}{{ message | tojson }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

#: Refuses a wrapped tool, like Mistral's.
BARE_TOOLS = (
    "{% for tool in tools or [] %}{{ tool['name'] + ' ' }}"
    "{% if 'function' in tool %}{{ raise_exception('wrapped') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)

TEMPLATES = {"smol": SMOL, "tools": TOOLS, "parts": PARTS, "bare_tools": BARE_TOOLS}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Zürich, 東京 & <b>"}},
            "required": ["city"],
        },
        "description": "Tells the weather",
        "strict": True,
        "unknown": 1,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALLED = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Zürich", "n": [1, 2.50]}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "18 °C"}

#: name → body. Every one is exact on every template that renders it.
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_user("What is 12345 + 67?")]},
    "unicode": {"messages": [_user("héllo 東京 🙂\n\n  \ttabs <|im_end|> <|im_start|>")]},
    "empty": {"messages": [_user("")]},
    "system": {"messages": [{"role": "System", "content": "Be brief."}, _user("Hi")]},
    "developer": {"messages": [{"role": "developer", "content": "D"}, _user("Hi")]},
    "dialogue": {
        "messages": [_user("a"), {"role": "assistant", "content": " b \n"}, _user("c")],
        "unknown_field": 1,
    },
    "parts": {
        "messages": [
            _user([{"type": "text", "text": "one"}, {"type": "text", "text": "two", "x": 1}]),
        ]
    },
    "no_parts": {"messages": [_user([])]},
    "user_name": {"messages": [{"role": "user", "name": "Ann", "content": "Hi"}]},
    "assistant_last": {"messages": [_user("a"), {"role": "assistant", "content": "Once"}]},
    "continued": {
        "messages": [_user("a"), {"role": "assistant", "content": "Once upon"}],
        "continue_final_message": True,
    },
    "reasoning": {
        "messages": [
            _user("a"),
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
            _user("c"),
        ]
    },
    "kwargs": {
        "messages": [_user("a")],
        "chat_template_kwargs": {"enable_thinking": False, "style": {"z": "é", "a": [1]}},
    },
    "effort": {"messages": [_user("a")], "reasoning_effort": "high"},
    "effort_none": {"messages": [_user("a")], "reasoning_effort": "none"},
    "effort_in_kwargs": {
        "messages": [_user("a")],
        "chat_template_kwargs": {"reasoning_effort": "low"},
    },
    "tools": {"messages": [_user("weather?")], "tools": [WEATHER, CLOCK]},
    "tools_auto": {"messages": [_user("w")], "tools": [WEATHER], "tool_choice": "auto"},
    "tools_none": {"messages": [_user("w")], "tools": [WEATHER], "tool_choice": "none"},
    "tools_chosen": {
        "messages": [_user("w")],
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
    },
    "no_tools": {"messages": [_user("w")], "tools": []},
    "tool_calls": {
        "messages": [_user("weather?"), CALLED, RESULT, _user("thanks")],
        "tools": [WEATHER],
    },
    "tool_parts": {
        "messages": [
            _user("weather?"),
            CALLED,
            {**RESULT, "content": [{"type": "text", "text": "18"}, {"type": "text", "text": "C"}]},
        ]
    },
    "ids": {"messages": [_user("ignored")], "input_ids": [5, 6, 7, 8, 9]},
}


def write_model(directory: Path, template: str | None, **config: Any) -> Path:
    """A tokenizer of one token per byte with that template; ``config`` overrides settings."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(CONTEXT_TOKENS).write(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"chat_template": template, **config}
    if template is None:
        del settings["chat_template"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return directory
