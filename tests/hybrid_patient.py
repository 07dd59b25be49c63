"""Hybrid attention as a patient file: python -m ring_doctor tests.hybrid_patient"""

from tests.mesh_patients import hybrid as attention
from tests.mesh_patients import setup

__all__ = ["attention", "setup"]
