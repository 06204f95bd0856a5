"""`input()` and `getpass()` over both ways that can answer, and refused where nobody can."""

import json

from tests.support import Kernel, printed, problem, stdout


def test_input_over_the_websocket(shared: Kernel) -> None:
    with shared.socket() as socket:
        socket.send("execute", code="name = input('Who? ')\nprint('hello', name)", request_id="a")
        asked = socket.until_type("input_request", "a")
        assert (asked["prompt"], asked["password"]) == ("Who? ", False)
        socket.send("input", execution_id=asked["execution_id"], value="Ada ✓")
        assert socket.until_type("ended", "a")["status"] == "ok"
        assert printed(socket.seen) == "hello Ada ✓\n"


def test_two_questions_of_one_cell(shared: Kernel) -> None:
    with shared.submitted("print([input(f'{n}? ') for n in range(2)])") as cell:
        for number in range(2):
            asked = cell.wait_for("input_request")
            assert asked["prompt"] == f"{number}? "
            cell.socket.send("input", execution_id=asked["execution_id"], value=f"answer {number}")
        cell.end()
        assert printed(cell.events) == "['answer 0', 'answer 1']\n"


def test_a_password_prompt_says_so(shared: Kernel) -> None:
    with shared.submitted("import getpass\nprint(len(getpass.getpass('PIN: ')))") as cell:
        asked = cell.wait_for("input_request")
        assert (asked["prompt"], asked["password"]) == ("PIN: ", True)
        cell.socket.send("input", execution_id=asked["execution_id"], value="1234")
        cell.end()
        assert printed(cell.events) == "4\n"


def test_input_over_http_with_a_stream(shared: Kernel) -> None:
    body = {"code": "print(input('Who? ').upper())", "allow_stdin": True}
    headers = {"Accept": "application/x-ndjson"}
    with shared.http.stream("POST", f"{shared.path}/execute", json=body, headers=headers) as answer:
        events = []
        for line in answer.iter_lines():
            events.append(json.loads(line))
            if events[-1]["type"] == "input_request":
                url = f"{shared.path}/executions/{events[-1]['execution_id']}/input"
                assert shared.http.post(url, json={"value": "ada"}).status_code == 204
                # A question is answered once.
                problem(shared.http.post(url, json={"value": "again"}), 409, "not_waiting_for_input")
    assert events[-1]["status"] == "ok"
    assert printed(events) == "ADA\n"


def test_input_is_refused_where_nobody_can_answer(shared: Kernel) -> None:
    for code in ("input('Who? ')", "import getpass\ngetpass.getpass()"):
        result = shared.execute(code)
        assert (result["status"], result["outputs"][-1]["ename"]) == ("error", "StdinNotImplementedError")
        events = shared.events(code)
        assert [event["ename"] for event in events if event["type"] == "error"] == ["StdinNotImplementedError"]
        assert not [event for event in events if event["type"] == "input_request"]
    with shared.socket() as socket:
        assert socket.execute("input()", allow_stdin=False)[-1]["status"] == "error"


def test_an_interrupt_ends_a_question(shared: Kernel) -> None:
    with shared.submitted("input('never answered')") as cell:
        asked = cell.wait_for("input_request")
        shared.interrupt()
        assert cell.end()["cause"]["code"] == "interrupted"
    late = shared.http.post(f"{shared.path}/executions/{asked['execution_id']}/input", json={"value": "late"})
    problem(late, 409, "not_waiting_for_input")
    assert shared.value("1") == "1"


def test_an_answer_without_a_question_is_refused(shared: Kernel) -> None:
    result = shared.execute("1")
    url = f"{shared.path}/executions/{result['execution_id']}/input"
    problem(shared.http.post(url, json={"value": ""}), 409, "not_waiting_for_input")
    assert stdout(shared.execute("print('on')")) == "on\n"
