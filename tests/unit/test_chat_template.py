"""ChatTemplate: what Hugging Face's templates use works, and what hurts is bounded."""

from __future__ import annotations

import json
import re
import resource
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from tiny_models import write_byte_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from legato.cluster.errors import RequestError
from legato.cluster.text.chat_template import ChatTemplate
from legato.cluster.text.model_text import ModelText
from legato.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": " hi "}]


def render(source: str, content: str | None = None) -> str:
    messages = MESSAGES if content is None else [{"role": "user", "content": content}]
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def refusal(source: str, **limits: float) -> str:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}, **limits).render(MESSAGES)  # type: ignore[arg-type]  # time_limit_s
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message.startswith("messages: ")
    return caught.value.message


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.first }}{{ loop.index0 }};{% endfor %}", "True0;False1;"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ messages[1].content | trim }}|{{ messages[1]['content'].strip() }}", "hi|hi"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages | tojson }}", json.dumps(MESSAGES)),
        ("{{ {'a': '<é>'} | tojson(indent=2) }}", '{\n  "a": "<é>"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% macro say(x, y='!') %}{{ x }}{{ y }}{% endmacro %}{{ say('a') }}{{ say('b', '?') }}",
         "a!b?"),
        ("{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}x{% endcall %}", "[x]"),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
         "systemuser"),
        ("{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
         "{% break %}{% endfor %}", "user"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ true }}", "a1NoneTrue"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "system, user"),
        ("{{ ['a', 'b'] | join }}{{ [1, 2] | sum }}{{ 'aba'.replace('a', 'xx') }}", "ab3xxbxx"),
        ("{{ 'a-%s-%d' % ('b', 3) }}{{ '{}{x}'.format(1, x=2) }}{{ '%s' | format('z') }}",
         "a-b-312z"),
        ("{{ 'ab'.center(6) }}{{ 'a\\nb' | indent(2) }}{{ 'a</t>b'.split('</t>')[-1] }}",
         "  ab  a\n  bb"),
        ("{{ messages[::-1][0].role }}{{ messages | length }}{{ tools is none }}", "user2True"),
        ("{% if tools is defined and tools %}x{% else %}y{% endif %}", "y"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{% if add_generation_prompt %}A:{% endif %}", "A:"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{{ 3 * 4 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 'ab' * 2 }}{{ range(3) | list }}",
         "12332abab[0, 1, 2]"),
    ],
)  # fmt: skip
def test_features_that_templates_use(source: str, text: str) -> None:
    assert render(source) == text


# What the families' templates are made of; the texts are our own.
SHAPES = {
    "dates, tools, system apart": """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_first is defined %}{%- set tools_first = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment\n" }}{%- endif %}
{{- "Today: " + date_string + "\n\n" + system_message }}
{%- if tools_first and not tools is none %}{{- raise_exception("no user message") }}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'calls' in message) %}
        {{- '<h>' + message['role'] + '</h>\n\n'+ message['content'] | trim + '<eot>' }}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\n\n' }}{%- endif %}
""",
    "instructions in brackets": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = '<<S>>\n' + messages[0]['content'] + '\n<</S>>\n\n' %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = '' %}{% endif %}"
        "{% for message in loop_messages %}{% if loop.index0 == 0 %}"
        "{% set content = system_message + message['content'] %}{% else %}"
        "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[I] ' + content.strip() + ' [/I]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "thoughts cut out, last query sought": """
{%- set ns = namespace(seek=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seek and message.role == "user" and message.content is string
        and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.seek = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set thought = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- if loop.index0 > ns.last and loop.last %}{{- thought.strip('\n') }}{%- endif %}
        {{- content }}
    {%- else %}{{- message.role + '\n' + message.content + '\n' }}{%- endif %}
    {%- if message.reasoning_content is defined and message.tool_calls %}!{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<no>' }}{%- endif %}
{%- endif %}
""",
}
CONVERSATIONS = [
    [("user", " hi ")],
    [("system", " be kind\n"), ("user", "a\n\nb")],
    [("user", "{{ 7 * 7 }}"), ("assistant", "<think>\nx\n</think>\n\ny"), ("user", "<r>z</r>")],
    [("user", "é🙂"), ("assistant", "<think>x</think>y")],
    [("tool", "<r>"), ("user", "")],
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_templates_render_as_in_transformers(
    shape: str, conversation: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": text} for role, text in conversation]
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(SHAPES[shape], names)

    def theirs() -> str:
        rendered, _ = render_jinja_template(
            [messages], chat_template=SHAPES[shape], add_generation_prompt=True, **names
        )
        return str(rendered[0])

    before, ours, after = theirs(), template.render(messages), theirs()
    assert ours in (before, after)  # they differ at midnight


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_a_refusal_has_the_templates_own_words() -> None:
    message = refusal("{{ raise_exception('Conversation roles must alternate') }}")
    assert message == (
        "messages: refused by the model's chat template: Conversation roles must alternate"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).__base__ }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum(2) }}",
        "{% set _legato_step = namespace %}x",
        "{% set _legato_\ufb06ep = namespace %}x",
    ],
)
def test_ways_out_of_the_sandbox_are_closed(source: str) -> None:
    sentence = refusal(source)
    # Unsafe attributes are undefined; what is used of them fails.
    assert "failed:" in sentence or "broken:" in sentence


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A template that makes something huge is killed here, not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 29), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set x = 'a' * 10000000 %}{{ x ~ x ~ x ~ x }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | join }}",
        "{% set x = 'a' * 1000000 %}{{ ''.join([x] * 100000) }}",
        "{% set x = 'a' * 1000000 %}{{ x.join('b' * 100000) }}",
        "{% set x = 'a' * 1000000 %}{{ (range(100000) | map('replace', '', x)) | join }}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ ('%s' * 100000) % ([x] * 100000) }}",
        "{% set x = 'a' * 1000000 %}{{ ('%(a)s' * 100000) % {'a': x} }}",
        "{% set x = 'a' * 1000000 %}{{ ('{0}' * 100000).format(x) }}",
        "{% set x = 'a' * 1000000 %}{{ ('%s' * 1000) | format(x, x) }}",
        "{{ ('\\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('\\n' * 1000000) | indent(1000000, true, true) }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
        "{% set x = [1] * 1000 %}{% set y = [x] * 1000 %}{{ [y] * 1000 }}",
        "{% set x = [1] * 1000 %}{% set y = [x] * 1000 %}{{ ([y] * 1000) | tojson }}",
        "{% set x = [1] * 1000 %}{% set y = [x] * 1000 %}{{ ([y] * 1000) | string }}",
        "{{ ([[1]] * 100000) | tojson(indent=1000000) }}",
        "{{ ([[1]] * 1000000) | sum(start=[]) | length }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | map('upper') | list | length }}",
        "{{ 'f' * 10000000 | int(0, 16) }}{{ ('f' * 10000000) | int(0, 16) }}",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("little_memory")
def test_endless_and_huge_templates_are_stopped(source: str) -> None:
    start = time.process_time()
    sentence = refusal(source, time_limit_s=0.3)
    assert time.process_time() - start < 10  # generous; the point is that it ends at all
    assert "MemoryError" not in sentence


def test_the_clock_is_what_ends_an_endless_loop() -> None:
    ticks = iter(range(10**9))
    template = ChatTemplate(
        "{% for a in range(9999) %}{% endfor %}", {}, clock=lambda: float(next(ticks))
    )
    with pytest.raises(RequestError, match="it ran for more than 5 s"):
        template.render(MESSAGES)


def test_output_is_bounded_by_what_the_caller_can_use() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    messages = [{"role": "user", "content": "x" * 11}]
    assert template.render([{"role": "user", "content": "x" * 10}], max_chars=10) == "x" * 10
    with pytest.raises(RequestError, match="it writes more than 10 characters"):
        template.render(messages, max_chars=10)


def test_long_contents_pass() -> None:
    long = "word <|im_end|> " * 100_000
    source = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role + '\\n' + m.content|trim }}"
        "{{ m.content.split('</think>')[-1].replace('<t>', '<|t|>')[:3] }}{% endfor %}"
    )
    assert render(source, long) == "<|im_start|>user\n" + long.strip() + "wor"


@pytest.mark.parametrize("source", ["{% if %}", "{{ ", "{% for %}", "{{ 1 | nosuch }}", "(" * 9])
def test_a_broken_template_is_said_when_used(source: str) -> None:
    if source.startswith("("):
        source = "{{ " + "(" * 100_000 + " }}"
    template = ChatTemplate(source, {})
    assert not template.names_role("tool")
    with pytest.raises(RequestError, match="the model's chat template is broken") as caught:
        template.render(MESSAGES)
    assert len(caught.value.message) < 700


def test_an_oversized_source_is_not_compiled() -> None:
    assert "at most 1048576" in refusal("{{ 1 }}" * (1 << 18))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0]['content']() }}", "TypeError"),
    ],
)
def test_errors_of_templates_are_the_requests(source: str, words: str) -> None:
    assert words in refusal(source)


def test_the_tool_role_is_taken_where_the_template_names_it() -> None:
    assert ChatTemplate("{% if m.role == 'tool' %}{% endif %}", {}).names_role("tool")
    assert not ChatTemplate("tool {{ 'tools' }}", {}).names_role("tool")


def test_without_a_template_messages_are_a_failed_precondition(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=None)
    text = ModelText.load(tmp_path)
    assert not text.has_chat_template
    with pytest.raises(RequestError, match="has no chat template") as caught:
        text.encode_chat([generation_pb2.ChatMessage(role="user", content="hi")])
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
