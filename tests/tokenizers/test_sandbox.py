"""Table 3.5 and case V12: templates that try to get out, or not to end."""

from __future__ import annotations

import ast
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway.errors import CutawayError, LimitExceeded, TemplateError
from cutaway.tokenizers import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]

REFUSED = {  # when the template is loaded
    "mro": "{{ ''.__class__.__mro__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch canary') }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "attr": "{{ ''|attr('__class__') }}",
    "item": "{{ ''['__class__'] }}",
    "map attribute": "{{ ['x']|map(attribute='__class__')|list }}",
    "map dotted": "{{ ['x']|map(attribute='a.__class__')|list }}",
    "undefined": "{{ foo.__class__ }}",
    "subclasses": "{{ dict.__base__.__subclasses__() }}",
    "macro globals": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "function globals": "{{ raise_exception.__globals__ }}",
    "loop": "{% for i in [1] %}{{ loop.__init__ }}{% endfor %}",
    "self": "{{ self._TemplateReference__context }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as p %}",
    "from": "{% from '/etc/passwd' import p %}",
    "extends": "{% extends '/etc/passwd' %}",
    "300 parentheses": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "not not not": "{{ " + "not " * 5000 + "1 }}",
    "long sum": "{{ " + "1+" * 9000 + "1 }}",
    "200 ifs": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "40 loops": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "digits": "{{ " + "9" * 5000 + " }}",
    "unknown filter": "{{ 'x'|nofilter }}",
    "unknown test": "{{ 'x' is notest }}",
    "syntax": "{% for %}",
    "unclosed": "{{ 'x",
    "wordwrap": "{{ 'x'|wordwrap(1) }}",
}
HUGE = {  # refused by size alone
    "30,000 parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "1 MiB": "a" * ((1 << 20) + 1),
    "20,000 tags": "{{ a }}" * 20_000,
    "500,000 items": "{{ [" + "1," * 500_000 + "] }}",
    "500,000 joins": "{{ a" + "~a" * 500_000 + " }}",
}
STOPPED = {  # while it runs
    "built name": "{% set n = '__cl' ~ 'ass__' %}{{ (''|attr(n)).mro() }}",
    "built item": "{% set n = '%c%c%s' % (95, 95, 'class__') %}{{ ''[n].mro() }}",
    "format class": "{{ '{0.__class__.__mro__}'.format('x') }}",
    "joiner": "{{ (joiner|attr('format'))('x') }}",
    "generator frame": "{% set g = messages|map('upper') %}{{ g.gi_frame.f_back.f_globals }}",
    "append": "{{ messages.append(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "update": "{{ messages[0].update({'a': 1}) }}",
    "dict.mro": "{{ dict.mro() }}",
    "sandbox itself": "{{ tick(1) }}",
    "request": "{{ request.application }}",
    "undefined": "{{ a.b.c }}",
    "unknown function": "{{ nofunc() }}",
    "raise": "{{ raise_exception('x') }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "long loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop filter": "{% for i in range(99999) if range(99999)|select('odd')|list|length < 0 %}{% endfor %}",
    "text times": "{{ 'a' * 10**9 }}",
    "times text": "{{ 10**9 * 'a' }}",
    "list times": "{{ ([1] * 10**9)|length }}",
    "center": "{{ 'x'|center(10**9) }}",
    "center, constant": "{{ 'x'|center(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000)|length }}",
    "zfill": "{{ 'x'.zfill(1000000000)|length }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000000)|length }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big')|length }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 1000}) }}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%0999999999d'|format(1) }}",
    "format method": "{{ '{:>999999999}'.format(1) }}",
    "format inner width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "format attribute": "{{ ('{:>999999999}'|attr('format'))(1) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "doubling ~": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling +": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling set": "{% set a = 'aa' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "doubling join": "{% set a = 'aa' %}" + "{% set a = [a, a]|join %}" * 40,
    "doubling %": "{% set a = 'aa' %}" + "{% set a = '%s%s' % (a, a) %}" * 40,
    "doubling format": "{% set a = 'aa' %}" + "{% set a = '{0}{0}'.format(a) %}" * 40,
    "doubling replace": "{% set a = 'aa' %}" + "{% set a = a|replace('a', 'aa') %}" * 40,
    "doubling replace method": "{% set a = 'aa' %}" + "{% set a = a.replace('a', 'aa') %}" * 40,
    "doubling macro": "{% macro m(n) %}{{ 'xx' }}{% if n %}{{ m(n-1) + m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "laughs": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "laughs, JSON": "{% set n = namespace(x={}) %}"
    "{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x|tojson }}",
    "slices": "{% set n = namespace(a=[]) %}{% set x = 'a' * 60000 %}"
    "{% for i in range(99999) %}{% set n.a = n.a + [x[:-1]] %}{% endfor %}",
    "namespace in itself": "{% set n = namespace() %}{% set n.a = n %}{{ n.a }}",
    "macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1, 1]) }}{% endfor %}",
    "much output": "{% for i in range(9000) %}" + "a" * 1000 + "{% endfor %}",
    "lipsum": "{{ lipsum(n=20000) }}",
    "dates": "{% for i in range(99999) %}{{ strftime_now('%Y' * 100) }}{% endfor %}",
    "wide date": "{{ strftime_now('%9999999d') }}",
    "round": "{{ 1.5|round(999999999) }}",
    "indent": "{{ 'a\\nb'|indent(99999999) }}",
    "batch": "{{ [1]|batch(999999999, 1)|list }}",
    "slice": "{{ [1]|slice(999999999)|list }}",
    "sum of lists": "{{ [[1]]|sum(start=[]) }}",
    "join": "{{ range(99999)|join('a' * 10000) }}",
    "JSON indent": "{{ [1]|tojson(indent=99999999) }}",
}
HARMLESS = {  # and what comes of it
    "attr by built name": ("{{ ''|attr('__cl' ~ 'ass__') }}", ""),
    "name alone": ("{{ ('%c' * 9) % (95, 95, 99, 108, 97, 115, 115, 95, 95) }}", "__class__"),
    "config": ("{{ config }}{{ environment }}{{ context }}{{ meter }}", ""),
    "frame": ("{{ (messages|map('upper')).gi_frame }}", ""),
    "600 x 600": ("{% for i in range(60) %}{% for j in range(600) %}{% endfor %}{% endfor %}", ""),
    "generation": ("a{% generation %}b{% endgeneration %}c", "abc"),
    "break": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "continue": ("{% for i in range(2) %}{{ i }}{% continue %}x{% endfor %}", "01"),
    "JSON as it is": ("{{ {'b': '<é>', 'a': [1, none]}|tojson }}", '{"b": "<é>", "a": [1, null]}'),
    "JSON in ASCII": ("{{ 'é😀'|tojson(ensure_ascii=true) }}", '"\\u00e9\\ud83d\\ude00"'),
    "trimmed blocks": ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    "slices": ("{{ messages[::-1][0].role[1:] }}{{ 'abc'[-1] }}", "serc"),
    "concat": ("{{ 1 ~ 'a' ~ none }}", "1aNone"),
    "namespace": ("{% set n = namespace(a=1) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "4"),
    "unpacking": ("{% for k, v in {'a': 1}.items() %}{% set x, y = v, k %}{{ x }}{{ y }}{% endfor %}", "1a"),
    "macro": ("{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}{{ m(1, y=3) }}", "1213"),
    "call block": ("{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}", "[x]"),
    "filter block": ("{% filter upper %}x{{ 'y' }}{% endfilter %}", "XY"),
    "recursive": ("{% for x in [1, [2]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
    "methods": ("{{ 'a-b'.split('-')|join('+') }}{{ 'x'.center(5) }}{{ '{:>3}'.format(7) }}", "a+b  x    7"),
    "undefined is empty": ("{{ tools_in_user_message }}{% if nothing is defined %}x{% endif %}", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(name: str):
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(REFUSED[name], path="model/tokenizer_config.json", field="/chat_template")
    assert caught.value.path == "model/tokenizer_config.json"
    assert caught.value.field == "/chat_template"


@pytest.mark.parametrize("name", HUGE)
def test_too_large_to_load(name: str):
    with pytest.raises(LimitExceeded):
        ChatTemplate(HUGE[name])


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_while_it_runs(name: str):
    template = ChatTemplate(STOPPED[name])
    with pytest.raises(TemplateError):
        template.render(MESSAGES)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name: str):
    source, want = HARMLESS[name]
    assert ChatTemplate(source).render(MESSAGES) == want


def test_there_are_enough_payloads():
    assert len(REFUSED) + len(HUGE) + len(STOPPED) >= 40


def test_v12_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No file is opened, no process started, nothing imported, whatever the template."""
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    active = threading.local()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        watched = ("open", "subprocess.Popen", "os.system", "os.exec", "import", "socket.connect")
        # Python itself looks for a file of that name when its compiler refuses the generated code.
        if getattr(active, "on", False) and event in watched and args[:1] != ("<template>",):
            seen.append(f"{event} {args[:1]}")

    warm = ChatTemplate("{{ strftime_now('%Y') }}{{ [1]|tojson }}")  # whatever is imported late, is now
    warm.render([])
    import jinja2.debug  # a first error brings it in

    assert jinja2.debug
    sys.addaudithook(audit)
    for source in [*REFUSED.values(), *STOPPED.values()]:
        active.on = True
        try:
            ChatTemplate(source).render(MESSAGES)
        except CutawayError:
            pass
        finally:
            active.on = False
    assert seen == []
    assert os.listdir(tmp_path) == []


def test_v12_user_text_is_not_a_template():
    text = "{{ 7*7 }}{% for %}"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_error_tells_the_line():
    with pytest.raises(TemplateError, match="line 3"):
        ChatTemplate("a\nb\n{% if %}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{{ ''.__class__ }}")
    with pytest.raises(TemplateError, match=r"^only user$"):
        ChatTemplate("{{ raise_exception('only user') }}").render([])


def test_renders_in_threads():
    template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}")
    wrong: list[str] = []

    def work(text: str) -> None:
        for _ in range(20):
            if template.render([{"role": "user", "content": text}]) != text * 200:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("content", [object(), b"x", {1, 2}, float])
def test_messages_must_be_json(content: Any):
    with pytest.raises(TemplateError, match="not JSON"):
        ChatTemplate("x").render([{"role": "user", "content": content}])


def test_messages_nested_too_deeply():
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(TemplateError, match="deeply"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


def test_long_conversations_are_fine():
    messages = [{"role": "user", "content": "x" * 5000}] * 400
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ m.content|trim }}{% endfor %}")
    assert len(template.render(messages)) == 400 * 5004


def test_one_environment_in_the_tree():
    """Templates run in one place. And nothing here compiles or evaluates text."""
    root = Path(cutaway.__file__).parent
    sources = [path.read_text() for path in root.rglob("*.py")]
    assert sum(source.count("(ImmutableSandboxedEnvironment)") for source in sources) == 1
    assert sum(source.count("Environment(") for source in sources) == 0  # the one above is made by its own name
    for source in (path.read_text() for path in (root / "tokenizers").glob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert not names & {"eval", "exec", "compile", "__import__"}
