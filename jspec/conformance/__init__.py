"""The sampling laws as a test of anyone's verifier: ``python -m jspec.conformance``."""

from jspec.conformance.laws import LAWS, Finding, check, diagnosis
from jspec.conformance.verifier import Verifier

__all__ = ["LAWS", "Finding", "Verifier", "check", "diagnosis"]
