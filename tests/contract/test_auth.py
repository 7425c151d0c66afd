"""Unit tests of the proofs of the job's token: what they cover, and that nobody can replay them."""

import dataclasses

import pytest

from everstep_contract import auth, names

SERVER = "10.0.0.7:7070"
PATH = "/v1/report"
BODY = b'{"a":1}'
NONCE = "0f" * 16
CHALLENGE = "5a" * 16


def a_connection(token: str = "token", server: str = SERVER) -> tuple[auth.Signer, auth.Verifier]:
    signer, verifier = auth.Signer(token, server), auth.Verifier(token, server, NONCE)
    signer.begin(verifier.nonce)
    return signer, verifier


def test_a_question_is_accepted_once() -> None:
    signer, verifier = a_connection()
    (_, first), (_, second) = (
        signer.sign("POST", PATH, BODY, CHALLENGE),
        signer.sign("POST", PATH, BODY, CHALLENGE),
    )
    taken = verifier.accept("POST", PATH, first)
    assert taken is not None
    assert taken[1] == auth.digest_of(BODY)
    assert verifier.accept("POST", PATH, first) is None
    assert verifier.accept("POST", PATH, second) is not None
    assert verifier.accept("POST", PATH, first) is None


@pytest.mark.parametrize(
    ("method", "path", "change"),
    [
        ("GET", PATH, {}),
        ("POST", "/v1/part", {}),
        ("POST", PATH, {auth.DIGEST: auth.digest_of(b"other")}),
        ("POST", PATH, {auth.CHALLENGE: "ab" * 16}),
        ("POST", PATH, {auth.CHALLENGE: ""}),
        ("POST", PATH, {auth.NONCE: "00" * 16}),
        ("POST", PATH, {auth.COUNTER: "2"}),
        ("POST", PATH, {auth.PROOF: ""}),
    ],
)
def test_the_proof_of_a_question_covers_all_of_it(
    method: str, path: str, change: dict[str, str]
) -> None:
    signer, verifier = a_connection()
    _, headers = signer.sign("POST", PATH, BODY, CHALLENGE)
    assert verifier.accept(method, path, headers | change) is None


@pytest.mark.parametrize("counter", ["", "-1", "x", "²", "0", " 1", "9" * 40])
def test_a_counter_that_is_no_number_is_refused(counter: str) -> None:
    signer, verifier = a_connection()
    _, headers = signer.sign("POST", PATH, BODY, CHALLENGE)
    assert verifier.accept("POST", PATH, headers | {auth.COUNTER: counter}) is None


@pytest.mark.parametrize(("token", "server"), [("other", SERVER), ("token", "10.0.0.8:7070")])
def test_a_question_for_another_job_or_another_agent_is_refused(token: str, server: str) -> None:
    signer, _ = a_connection()
    verifier = auth.Verifier(token, server, NONCE)
    signer.begin(verifier.nonce)
    _, headers = signer.sign("POST", PATH, BODY, CHALLENGE)
    assert verifier.accept("POST", PATH, headers) is None


def test_an_answer_is_believed_for_its_own_question_status_and_body() -> None:
    signer, verifier = a_connection()
    question, headers = signer.sign("POST", PATH, BODY, CHALLENGE)
    taken = verifier.accept("POST", PATH, headers)
    assert taken is not None
    proof = verifier.sign(taken[0], 200, b"{}")
    assert signer.believe(question, 200, proof) == auth.digest_of(b"{}")
    assert signer.believe(question, 400, proof) is None
    forged = {auth.DIGEST: auth.digest_of(b'{"done":true}')}
    assert signer.believe(question, 200, proof | forged) is None
    assert signer.believe(question, 200, {}) is None
    next_one, _ = signer.sign("POST", PATH, BODY, CHALLENGE)
    assert signer.believe(next_one, 200, proof) is None


def test_a_question_proves_no_answer() -> None:
    """A listener cannot send a request's proof back as the proof of an answer."""
    signer, _ = a_connection()
    question, headers = signer.sign("POST", PATH, BODY, CHALLENGE)
    assert signer.believe(question, 200, headers) is None


@pytest.mark.parametrize("nonce", ["", "0", "answer\n200", "00\n1", "g" * 32, "0" * 65])
def test_nothing_but_a_nonce_is_signed(nonce: str) -> None:
    with pytest.raises(ValueError, match="is not a nonce"):
        auth.Signer("token", SERVER).begin(nonce)


def test_a_server_of_one_minor_version_before_can_check_what_the_operator_wants() -> None:
    """That server computes this HMAC over what it receives, and checks nothing else."""
    signer, verifier = a_connection()
    question, headers = signer.sign("POST", names.WANTED_PATH, BODY, CHALLENGE)
    assert headers[auth.OLD_PROOF] == auth.prove_as_before("token", question, BODY)
    assert auth.OLD_PROOF not in signer.sign("POST", PATH, BODY, CHALLENGE)[1]
    _, headers = signer.sign("POST", names.WANTED_PATH, BODY, CHALLENGE)
    taken = verifier.accept_as_before("POST", names.WANTED_PATH, headers, BODY)
    assert taken is not None
    assert verifier.accept_as_before("POST", names.WANTED_PATH, headers, BODY) is None


def test_the_older_proof_counts_for_the_operators_document_alone() -> None:
    _, verifier = a_connection()
    asked = auth.Exchange(
        server="", nonce=verifier.nonce, counter=1, challenge="", method="POST", path=PATH
    )
    for path, believed in ((PATH, False), (names.WANTED_PATH, True)):
        question = dataclasses.replace(asked, path=path)
        headers = {
            auth.NONCE: verifier.nonce,
            auth.COUNTER: "1",
            auth.OLD_PROOF: auth.prove_as_before("token", question, BODY),
        }
        assert (verifier.accept_as_before("POST", path, headers, BODY) is not None) == believed


def test_the_token_does_not_travel_and_is_the_jobs_own() -> None:
    token = auth.derive_token(b"key", "uid")
    assert token != auth.derive_token(b"key", "other")
    signer, _ = a_connection(token)
    _, headers = signer.sign("POST", names.WANTED_PATH, BODY, CHALLENGE)
    assert token not in "".join(headers.values())
