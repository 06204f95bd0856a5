"""The twenty-two cells of the compatibility run: what data analysis needs must work under the full lock-down.

Each needs something that a sandbox could take away: threads, processes and their semaphores in /dev/shm, shared memory,
mmap, a pseudo-terminal, temporary files, BLAS. They run in one kernel, as an analysis does; each can run alone.
"""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support import Gateway, Kernel, Result, stdout

Check = Callable[[Result], bool]

DATA = "import numpy as np, pandas as pd\ndf = pd.DataFrame({'key': ['a', 'b'] * 50, 'value': np.arange(100)})\n"


def result_is(text: str) -> Check:
    return lambda result: result["outputs"][-1]["data"]["text/plain"] == text


def prints(text: str) -> Check:
    return lambda result: stdout(result) == text


CELLS: dict[str, tuple[str, Check]] = {
    "arithmetic": ("2 ** 100 % 97, sum(range(1000)), 0.1 + 0.2", result_is("(16, 499500, 0.30000000000000004)")),
    "imports": (
        (
            "import numpy, pandas, scipy, sklearn, matplotlib, pyarrow\n"
            "all(m.__version__ for m in (numpy, pandas, scipy, sklearn, matplotlib, pyarrow))"
        ),
        result_is("True"),
    ),
    "groupby": (DATA + "df.groupby('key')['value'].sum().to_dict()", result_is("{'a': 2450, 'b': 2500}")),
    "savefig": (
        (
            "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.savefig('plot.png')\n"
            "open('plot.png', 'rb').read(4)"
        ),
        result_is(r"b'\x89PNG'"),
    ),
    "random forest": (
        (
            "from sklearn.datasets import make_classification\nfrom sklearn.ensemble import RandomForestClassifier\n"
            "X, y = make_classification(300, random_state=0)\n"
            "RandomForestClassifier(50, n_jobs=2, random_state=0).fit(X, y).score(X, y)"
        ),
        result_is("1.0"),
    ),
    "parquet": (DATA + "df.to_parquet('df.parquet')\npd.read_parquet('df.parquet').equals(df)", result_is("True")),
    "csv": (DATA + "df.to_csv('df.csv', index=False)\npd.read_csv('df.csv').equals(df)", result_is("True")),
    "sqlite": (
        DATA
        + "import sqlite3\nwith sqlite3.connect('df.sqlite') as db:\n    df.to_sql('t', db, index=False, if_exists='replace')\n"
        "    total = pd.read_sql('select sum(value) as s from t', db)['s'][0]\nint(total)",
        result_is("4950"),
    ),
    "svd": (
        (
            "import numpy as np\nm = np.random.default_rng(0).normal(size=(400, 400))\nu, s, v = np.linalg.svd(m)\n"
            "bool(np.allclose(u * s @ v, m))"
        ),
        result_is("True"),
    ),
    "subprocess pipe": (
        "import subprocess\nsubprocess.run(\"printf 'b\\na\\n' | sort | tr a-z A-Z\", shell=True, capture_output=True, text=True).stdout",
        result_is("'A\\nB\\n'"),
    ),
    "shell escape": ("!echo to the terminal && test -t 1 && echo it is one", lambda r: "it is one" in stdout(r)),
    "process pool": (
        "from concurrent.futures import ProcessPoolExecutor\nwith ProcessPoolExecutor(2) as pool: found = list(pool.map(abs, range(-5, 0)))\nfound",
        result_is("[5, 4, 3, 2, 1]"),
    ),
    "joblib": (
        "from joblib import Parallel, delayed\nimport math\nParallel(n_jobs=2)(delayed(math.sqrt)(n * n) for n in range(4))",
        result_is("[0.0, 1.0, 2.0, 3.0]"),
    ),
    "shared memory": (
        (
            "from multiprocessing.shared_memory import SharedMemory\nm = SharedMemory(create=True, size=1000)\n"
            "m.buf[:3] = b'abc'\nother = SharedMemory(m.name)\nfound = bytes(other.buf[:3])\nother.close(); m.close(); m.unlink()\nfound"
        ),
        result_is("b'abc'"),
    ),
    "top-level await": ("import asyncio\nawait asyncio.sleep(0, 'awaited')", result_is("'awaited'")),
    "temporary file": (
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('kept')\n    f.seek(0)\n    found = f.read(), f.name[:5]\nfound",
        result_is("('kept', '/tmp/')"),
    ),
    "twenty threads": (
        (
            "from concurrent.futures import ThreadPoolExecutor\nimport threading\nbarrier = threading.Barrier(20)\n"
            "with ThreadPoolExecutor(20) as pool: found = list(pool.map(lambda n: (barrier.wait(60), n)[1], range(20)))\nfound == list(range(20))"
        ),
        result_is("True"),
    ),
    "zip file": (
        (
            "import zipfile\nwith zipfile.ZipFile('z.zip', 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('inner.txt', 'x' * 1000)\n"
            "len(zipfile.ZipFile('z.zip').read('inner.txt'))"
        ),
        result_is("1000"),
    ),
    "mmap": (
        (
            "import mmap\nwith open('m.bin', 'w+b') as f:\n    f.write(bytes(8192))\n    f.flush()\n"
            "    with mmap.mmap(f.fileno(), 0) as m: m[4096:4100] = b'here'\n    f.seek(4096); found = f.read(4)\nfound"
        ),
        result_is("b'here'"),
    ),
    "html": (
        "from IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))",
        lambda r: [o["data"]["text/html"] for o in r["outputs"]] == ["<b>bold</b>"],
    ),
    "timeit": ("%timeit -n 10 -r 2 sum(range(100))", lambda r: re.search(r"s ± .* per loop \(mean", stdout(r)) is not None),
    "exception": (
        "{}['missing']",
        lambda r: (r["status"], r["outputs"][-1]["ename"], r["cause"]["code"]) == ("error", "KeyError", "exception"),
    ),
}


@pytest.fixture(scope="module")
def analysis(gateway: Gateway) -> Iterator[Kernel]:
    with gateway.kernel() as kernel:
        yield kernel


@pytest.mark.parametrize("name", CELLS)
def test_cell(analysis: Kernel, name: str) -> None:
    code, check = CELLS[name]
    result = analysis.execute(code)
    assert check(result), result
    assert result["status"] == ("error" if name == "exception" else "ok")


def test_there_are_twenty_two() -> None:
    assert len(CELLS) == 22


def test_pools_are_sized_by_the_sandbox_not_by_the_machine(analysis: Kernel) -> None:
    assert analysis.value("import os\nos.cpu_count(), os.environ['OMP_NUM_THREADS']") == "(1, '1')"


TOGETHER = {
    "pandas": "import pandas as pd\npd.DataFrame({'a': ['x', 'y']})['a'].str.upper().tolist()",
    "polars": "import polars as pl\npl.DataFrame({'a': ['x', 'x']}).group_by('a').len()['len'].to_list()",
    "duckdb": "import duckdb\nduckdb.sql('select 40 + 2').fetchall()",
    "statistics": "import scipy.stats, sklearn.ensemble, statsmodels.api as sm\nround(scipy.stats.norm.cdf(0), 1)",
    "figures": "import matplotlib.pyplot as plt, plotly.graph_objects as go, seaborn as sns\nlen(go.Figure(go.Bar(y=[1, 2])).data)",
    "algebra": "import sympy\nsympy.factor('x**2 - 1')",
    "sheets": "import openpyxl, PIL.Image, tabulate\npd.DataFrame({'a': [1]}).to_excel('s.xlsx')\npd.read_excel('s.xlsx')['a'].tolist()",
}


def test_all_libraries_fit_into_one_kernel_together(gateway: Gateway) -> None:
    # Each of them reserves memory for pools of its own, most of which is never used: that must not count.
    with gateway.kernel() as kernel:
        for name, code in TOGETHER.items():
            result = kernel.execute(code, timeout=60)
            assert result["status"] == "ok", (name, result["cause"])
        assert result["usage"]["memory_peak"] < 512 * 1024**2
