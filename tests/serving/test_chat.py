"""The chat: turns, commands, Ctrl-C and the end of input, by scripted stdin."""

import dataclasses
import signal

import pytest
from serving.tiny_pair import MAX_TOKENS, config, pair, terminal

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.config import ConfigError
from dflash_jax.decoding.generate import Delta, generate
from dflash_jax.serving.chat import chat
from dflash_jax.serving.config import read_config
from dflash_jax.serving.run import serve
from dflash_jax.serving.session import Session
from dflash_jax.serving.terminal import Terminal
from dflash_jax.training.dry_run import tiny_target


@pytest.fixture(scope="module")
def tiny():
    return pair()


def session_of(tiny, **changes) -> Session:
    settings = read_config(config(**changes))
    return Session(tiny[0], tiny[1], settings.generation, settings.drafter)


def spoken(screen: Terminal) -> list[str]:
    """What was answered to each line of the script, the prompt sign taken off."""
    return [part.removesuffix("\n") for part in screen.out.file.getvalue().split("> ")[1:]]


def expected(target, *turns: str) -> list[str]:
    """The answers of plain decoding to the same conversation."""
    messages, answers = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = target.tokenizer.apply_chat_template(messages)
        answers.append(generate(target, None, [ids], max_tokens=MAX_TOKENS)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_turns_build_on_each_other(tiny):
    screen = terminal("one\ntwo\n/exit\nthree\n")
    assert serve(config(), terminal=screen, target=tiny[0], drafter=tiny[1]) is None
    answers = expected(tiny[0], "one", "two")
    assert answers[1] != expected(tiny[0], "two")[0]  # the second turn saw the first
    assert spoken(screen) == [*answers, ""]
    assert screen.err.file.getvalue().count("tokens a target call") == 2


def test_end_of_input_ends_the_chat(tiny):
    screen = terminal("one")  # no newline either
    serve(config(), terminal=screen, target=tiny[0], drafter=tiny[1])
    assert spoken(screen)[0] == expected(tiny[0], "one")[0]


def test_commands_and_empty_lines(tiny):
    screen = terminal("\n  \none\n/reset\none\n/what is this\n/exit\n")
    serve(config(), terminal=screen, target=tiny[0], drafter=tiny[1])
    answer = expected(tiny[0], "one")[0]
    assert [text for text in spoken(screen) if text] == [answer, answer]
    assert "/what is no command" in screen.err.file.getvalue()


class Interrupting(Session):
    """Ctrl-C in the middle of the first answer, before anything of the second, never after."""

    answers = 0

    def stream(self, mode, request):
        self.answers += 1
        deltas = super().stream(mode, request)
        if self.answers == 1:
            yield next(deltas)
            deltas.close()
            raise KeyboardInterrupt
        if self.answers == 2:
            raise KeyboardInterrupt
        yield from deltas


def test_ctrl_c_stops_an_answer_and_not_the_chat(tiny):
    target, drafter = tiny
    settings = read_config(config())
    session = Interrupting(target, drafter, settings.generation, settings.drafter)
    screen = terminal("one\ntwo\nthree\n/exit\n")
    chat(session, screen)
    assert screen.err.file.getvalue().count("stopped") == 2
    first = expected(target, "one")[0]
    begun, nothing, whole, _ = spoken(screen)
    assert first.startswith(begun.strip("\n")) and nothing.strip() == ""
    # What was given out stays in the conversation, the question without any answer does not.
    messages = [{"role": "user", "content": "one"}]
    if begun.removesuffix("\n"):
        messages.append({"role": "assistant", "content": begun.removesuffix("\n")})
    else:
        messages.clear()
    ids = target.tokenizer.apply_chat_template([*messages, {"role": "user", "content": "three"}])
    assert whole == generate(target, None, [ids], max_tokens=MAX_TOKENS)[0].text


class Finalised:
    """Ctrl-C comes while Python runs a finaliser, whose exceptions are lost."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_in_a_finaliser_is_not_lost(tiny):
    class Collecting(Session):
        def stream(self, mode, request):
            for delta in super().stream(mode, request):
                Finalised()
                yield delta

    settings = read_config(config())
    before = signal.getsignal(signal.SIGINT)
    screen = terminal("one\n/exit\n")
    chat(Collecting(*tiny, settings.generation, settings.drafter), screen)
    assert screen.err.file.getvalue().count("stopped") == 1
    whole, begun = expected(tiny[0], "one")[0], spoken(screen)[0].removesuffix("\n")
    assert whole.startswith(begun) and len(begun) < len(whole)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_goes_on(tiny):
    class Fidgety(Terminal):
        reads = 0

        def read_line(self, prompt):
            self.reads += 1
            if self.reads == 1:
                raise KeyboardInterrupt
            return super().read_line(prompt)

    plain = terminal("one\n/exit\n")
    screen = Fidgety(plain.stdin, plain.out.file, plain.err.file)
    chat(session_of(tiny), screen)
    assert expected(tiny[0], "one")[0] in screen.out.file.getvalue()


def test_an_abandoned_answer_leaves_nothing_behind(tiny):
    """B18: after an answer that is broken off in the middle, the next has its tokens and its acceptance list."""
    session = session_of(tiny)
    request = session.request(session.encode([{"role": "user", "content": "one"}]))

    def answer() -> list[Delta]:
        return list(session.stream("dflash", request))

    fresh = answer()
    broken = session.stream("dflash", session.request(session.encode([{"role": "user", "content": "another"}])))
    next(broken)
    next(broken)
    broken.close()
    assert answer() == fresh


def test_a_conversation_that_fills_the_context(tiny):
    small = dataclasses.replace(tiny[0], config=dataclasses.replace(tiny[0].config, max_positions=48))
    screen = terminal("one\nthis makes the conversation too long\n/reset\none\n/exit\n")
    serve(config(), terminal=screen, target=small, drafter=tiny[1])
    answer, nothing, _, again, _ = spoken(screen)
    assert "the context of random:tiny holds 48" in screen.err.file.getvalue()
    assert nothing == "" and answer == again


def test_plain_chat_has_no_tau(tiny):
    screen = terminal("one\n")
    serve(config(**{"drafter.source": ""}), terminal=screen, target=tiny[0])
    assert "tokens/s" in screen.err.file.getvalue() and "target call" not in screen.err.file.getvalue()


def test_a_trial_needs_no_checkpoint():
    random = {"target.source": "random:tiny", "drafter.source": "random:tiny"}
    screen = terminal("one\n")
    serve(config(**random), terminal=screen)
    assert spoken(screen)[0] == expected(tiny_target(), "one")[0]
    for wrong, message in (
        ({"target.dtype": "bfloat16"}, "target.dtype is 'bfloat16', but random:tiny is made in float32"),
        ({"drafter.source": "nowhere"}, "nowhere is no directory"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            serve(config(**{**random, **wrong}), terminal=terminal())
    other = dataclasses.replace(tiny_target(), source="other")
    with pytest.raises(ConfigError, match=r"drafter\.source is 'random:tiny', .* only, not other"):
        serve(config(**random), terminal=terminal(), target=other)


def test_sampled_turns_have_seeds_of_their_own(tiny):
    changes = {"generation.temperature": 1.0}
    screens = [terminal("one\n/reset\none\n"), terminal("one\n/reset\none\n")]
    for screen in screens:
        serve(config(**changes), terminal=screen, target=tiny[0], drafter=tiny[1])
    first, _, second, _ = spoken(screens[0])
    assert first != second and spoken(screens[0]) == spoken(screens[1])


def test_the_model_can_not_drive_the_terminal():
    screen = terminal()
    screen.write("a\x1b[2Jb[bold]c[/bold]\n")
    assert screen.out.file.getvalue() == "a\N{SYMBOL FOR ESCAPE}[2Jb[bold]c[/bold]\n"
