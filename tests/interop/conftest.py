"""An exported folder that the tests here share."""

import pytest
from small_exports import BPE, small_model

from annotated.interop.hugging_face import export_to_hugging_face


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "bpe"
    export_to_hugging_face(small_model(), BPE, folder)
    return folder
