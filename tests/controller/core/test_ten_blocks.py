"""The example of vLLM's design document on prefix caching: ten blocks of four tokens."""

from tests.controller.core.driver import Driver, new_block_ids


def test_ten_block_example() -> None:
    """A, then B sharing ten tokens with it, A freed, B freed, and C sharing twelve with A."""
    driver = Driver(block_count=11, block_size=4)
    first = list(range(100, 115))
    assert new_block_ids(driver.open(1, first)) == [1, 2, 3, 4]
    assert driver.decode(1, 7) == 0
    assert driver.decode(1, 8) == 5
    second = [*first[:10], 200, 201, 202, 203]
    opened = driver.open(2, second)
    assert new_block_ids(opened) == [1, 2, 6, 7]
    assert opened.published_token_count == 8
    driver.close(1)
    assert driver.free_order() == [5, 8, 9, 10, 4, 3]
    driver.close(2)
    third = first[:12] + list(range(300, 317))
    opened = driver.open(3, third)
    assert opened.plan.cached.end_token == 12
    assert new_block_ids(opened) == [1, 2, 3, 7, 5, 8, 9, 10]
