"""The error codes that the package itself uses. Importing any part of ``base`` fills them in."""

from __future__ import annotations

from rose_compiler.base.errors import (
    CATALOGUE,
    CaptureError,
    ConfigError,
    DeclarationError,
    FactoryError,
    HostDied,
    HostTimeout,
    ParseError,
    RoseError,
    RuntimeFault,
    VerifyError,
    register,
)


def _register_all(cls: type[RoseError], entries: dict[str, tuple[str, str]]) -> None:
    for code, (description, help) in entries.items():
        register(code, cls, description, help)


_register_all(
    CaptureError,
    {
        "capture-return-in-loop": (
            "`return` inside a loop",
            "assign the result, `break`, and return after the loop",
        ),
        "capture-try-around-component": (
            "`try` around a call to a policy, simulator or trainer",
            "move the `try` around the call of the compiled function, or into the component",
        ),
        "capture-locals": (
            "`locals()`, `vars()` or a frame object in the compiled function",
            "name the variables that are needed",
        ),
        "capture-exec": (
            "`exec` in the compiled function",
            "write the statements out, or move the `exec` into a function that is called",
        ),
        "capture-eval": (
            "`eval` in the compiled function",
            "write the expression out, or move the `eval` into a function that is called",
        ),
        "capture-manual-enter": (
            "`__enter__` or `__exit__` called by hand",
            "use a `with` statement",
        ),
        "capture-thread": (
            "threads, processes, queues or futures in the compiled function",
            "call the work directly; the compiler overlaps independent work by itself",
        ),
        "capture-wall-clock-branch": (
            "a branch or loop that hangs on the wall clock",
            "decide outside the compiled function and pass the decision in, or count steps "
            "instead of seconds",
        ),
        "capture-rebind-component": (
            "a component (policy, simulator, optimizer) is rebound inside the loop",
            "keep the object and change its contents (`load_state_dict`, `reset`), or rebind it "
            "between calls",
        ),
        "capture-nested-def": (
            "`def` or `class` inside the compiled function",
            "define it outside and call it",
        ),
        "capture-lambda": (
            "`lambda` that may be kept inside the compiled function",
            "define a named function outside and pass it",
        ),
        "capture-global": (
            "`global` in the compiled function",
            "keep the variable as an attribute of an object that is passed in",
        ),
        "capture-nonlocal": (
            "`nonlocal` in the compiled function",
            "keep the variable as an attribute of an object that is passed in",
        ),
        "capture-mutate-iterated": (
            "a container is changed while a loop iterates over it",
            "iterate over a copy: `for x in list(xs)`",
        ),
        "capture-no-source": (
            "the source of the function can't be found or no longer matches it",
            "define the function in a file, not in `exec` or an interactive prompt without source",
        ),
        "capture-builtin": (
            "a builtin or a function written in C can't be compiled",
            "wrap the call in a Python function",
        ),
        "capture-lambda-fn": (
            "a `lambda` can't be compiled",
            "write it as a named function",
        ),
        "capture-generator-fn": (
            "a generator or coroutine function can't be compiled",
            "write one iteration as a plain function and compile that",
        ),
        "capture-class": (
            "a class can't be compiled",
            "compile a function or one of its methods",
        ),
        "capture-not-callable": (
            "what was given is no function",
            "pass a Python function, a bound method or a closure",
        ),
        "capture-unsupported": (
            "a construct that is neither structured nor safe to keep as a block",
            "move the statement into a function and declare its reads and writes with "
            "`rose_compiler.component`",
        ),
    },
)

_register_all(
    DeclarationError,
    {
        "declare-syntax": (
            "an entry of `reads=`, `writes=` or `batch=` can't be read",
            'write a path rooted at a parameter or `self`, like "self.policy.params" or "buf[t]"',
        ),
        "declare-unknown-name": (
            "a declaration names a parameter that the function does not have",
            "use the names of the function's own signature",
        ),
        "declare-target": (
            "`component` or `declare` was applied to something that is no function",
            "pass a function or a method of a class: `declare(Type.method, ...)`",
        ),
        "declare-conflict": (
            "the same function is declared twice, differently",
            "keep one of the two declarations",
        ),
        "declare-contradicted": (
            "a run did what its declaration says does not happen",
            "add the effect to the declaration",
        ),
    },
)

_register_all(
    VerifyError,
    {
        "verify-captured": (
            "a captured program breaks an invariant of its stage",
            "set ROSE_DUMP=dir and report the dump with this message",
        ),
        "verify-scheduled": (
            "a scheduled program breaks an invariant of its stage",
            "set ROSE_DUMP=dir and report the dump with this message",
        ),
        "verify-dependence": (
            "a rewrite moved an operation past one that it depends on",
            "leave the pass out with ROSE_PASSES=-name and report the dump",
        ),
        "verify-round-trip": (
            "a dump does not parse back to the program it was printed from",
            "set ROSE_VERIFY=1 to go on without this check and report the dump",
        ),
        "verify-deadlock": (
            "the order of the lanes and the dependences wait for each other",
            "set ROSE_SERIAL=1 to run on one lane and report the dump",
        ),
    },
)

_register_all(
    ParseError,
    {
        "parse-syntax": (
            "the text of a dump is not in the language of dumps",
            "compare with a dump printed by `compiled.ir()`",
        ),
        "parse-unknown-op": (
            "a dump calls an operation that has no signature on top of it",
            "add its `@op(...)` signature, or bind it: `parse(text, bind={name: function})`",
        ),
        "parse-unknown-name": (
            "a dump uses a name before it is defined",
            "define it as a parameter, a state or a result above the use",
        ),
        "parse-unbound": (
            "an operation that was parsed without an implementation was run",
            "bind it: `parse(text, bind={name: function})`",
        ),
    },
)

_register_all(
    ConfigError,
    {
        "config-numerics": (
            "`numerics=` is neither of the two modes",
            'use numerics="close" or numerics="bitwise"',
        ),
        "config-knob": (
            "a setting does not exist or has a value that it can't take",
            "docs/house.md lists the settings and their values",
        ),
        "config-argument": (
            "an argument of `compile` has a value that it can't take",
            "see `help(rose_compiler.compile)`",
        ),
        "config-pass": (
            "a pass is named that does not exist",
            "`rose_compiler.passes.pipeline` lists the passes",
        ),
        "config-decision": (
            "a decision file can't be read or belongs to another program",
            "tune again with tune=True and save the new decision",
        ),
    },
)

_register_all(
    RuntimeFault,
    {
        "host-start": (
            "a host process could not be started",
            "the worker's own output, above, says why",
        ),
        "sizes-changed": (
            "an operation that was taken apart was handed sizes that were not seen before",
            "call the function again: it is captured anew, for these sizes too",
        ),
        "fault-closed": (
            "a lane, host or compiled function was used after it was closed",
            "build it anew",
        ),
    },
)
_register_all(
    HostDied,
    {
        "host-died": (
            "a host process ended while its component was needed",
            "its component is lost: build it anew from its factory",
        ),
    },
)
_register_all(
    HostTimeout,
    {
        "host-timeout": (
            "a host did not answer within the time limit",
            "raise `timeout=`, or look for a component that hangs",
        ),
    },
)
_register_all(
    FactoryError,
    {
        "host-factory-pickle": (
            "a component's factory can't be pickled",
            "build what it captures inside the factory instead",
        ),
        "host-factory-raised": (
            "a component's factory raised in its host",
            "call the factory in this process to see it fail",
        ),
    },
)

#: The codes that every installation has, whatever else is imported.
BASE_CODES = tuple(CATALOGUE)
