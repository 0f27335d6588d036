"""Scripts that try to leave an interpreter, or to use it up, and mixtures of them."""

from __future__ import annotations

from random import Random

# {file} is a file that no script may read, {port} one that none may connect to.
ATTEMPTS = (
    *("open('{file}').read()", "import pathlib\npathlib.Path('{file}').read_text()", "open('{file}', 'w').write('x')"),
    *(
        "import os\nos.environ",
        "import os\nos.system('cat {file}')",
        "import subprocess\nsubprocess.run(['cat', '{file}'])",
    ),
    "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')",
    *("import ctypes\nctypes.CDLL(None).system(b'cat {file}')", "__import__('os').system('cat {file}')"),
    *("().__class__.__bases__[0].__subclasses__()", "price.__globals__", "price.__code__", "price.__closure__"),
    *(
        "getattr(price, '__glo' + 'bals__')",
        "'{{0.__class__.__init__.__globals__}}'.format(price)",
        "f'{{price.__dict__}}'",
    ),
    *("import sys\nsys._getframe().f_back.f_globals", "import gc\ngc.get_objects()", "import inspect\ninspect.stack()"),
    *("eval('open(\"{file}\").read()')", "exec('import os')", "compile('1', '', 'eval')", "globals()", "locals()"),
    *(
        "'a' * 10**10",
        "[0] * 10**10",
        "10 ** 10**8",
        "str(10 ** 10**6)",
        "int('9' * 10**6)",
        "'{{:1000000000}}'.format(1)",
    ),
    *("x = [1]\nwhile True:\n    x += x", "dict.fromkeys(range(10**9))", "import math\nmath.factorial(10**7)"),
    *("def f():\n    return f()\nf()", "async def f():\n    await f()\nawait f()", "while True:\n    pass"),
    *(
        "import re\nre.match('(a|a)+$', 'a' * 60 + 'b')",
        "import json\njson.loads('[' * 100_000)",
        "x = []\nx.append(x)\nx",
    ),
    *("print('x' * 40_000_000)", "for _ in range(10**9):\n    print('x')", "import time\nwhile True:\n    time.time()"),
    *("import asyncio\nawait asyncio.gather(*[price(str(n)) for n in range(10**5)])", "price(*[1] * 10**6)"),
    *(
        "price(price)",
        "price(float('nan'))",
        "price('\\ud800')",
        "x = {{}}\nx['a'] = x\nprice(x)",
        "price.x = 1\nprice()",
    ),
    *(
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "exit()",
        "yield 1",
        "return 1",
        "await 1",
        "(" * 9000,
        "\x00",
        "\ud800",
    ),
    *("class A:\n    def __del__(self):\n        open('{file}')\nA()", "del price\nprice('A')", "price = 3\nprice"),
)


def write_hostile_script(random: Random, file: str, port: int) -> str:
    """Return an attempt, or a mixture of two."""
    one, two = [random.choice(ATTEMPTS).format(file=file, port=port) for _ in range(2)]
    indented = one.replace("\n", "\n    ")
    match random.randrange(7):
        case 0:
            return one
        case 1:
            return f"{one}\n{two}"
        case 2:
            return f"try:\n    {indented}\nexcept BaseException as error:\n    print(error)\n{two}"
        case 3:
            deeper = indented.replace("\n", "\n    ")
            return f"while True:\n    try:\n        {deeper}\n    except BaseException:\n        pass"
        case 4:
            return f"async def f():\n    {indented}\n    await price('A')\nawait f()\n{two}"
        case 5:
            return one[: random.randrange(len(one) + 1)] + two[random.randrange(len(two) + 1) :]
        case _:
            place = random.randrange(len(one))
            return one[:place] + chr(random.randrange(1, 0x300)) + one[place + 1 :]
