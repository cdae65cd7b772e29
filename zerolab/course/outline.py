"""The course's thirteen lessons, once: what the README, lesson 01 and the errata say of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """One lesson; `minutes` is 0 and `builds` a plan where it is announced and not yet written."""

    number: str
    name: str
    question: str
    minutes: int
    builds: str

    @property
    def stem(self) -> str:
        """Its notebook's name without the ending."""
        return f"{self.number}_{self.name.lower().replace('-', '_').replace(' ', '_')}"


_ROWS = (
    Lesson("01", "Learning objectives", "What will you be able to do at the end?", 20,
           "an average over four ranks, within a traffic budget"),
    Lesson("02", "Notation", "Which letter counts what, and in which unit?", 25,
           "K of any recipe; bytes of any elements; formulas that take numbers"),
    Lesson("03", "Core intuition", "How much of what four ranks hold is there four times?", 35,
           "a meter of redundancy; who owns which element; a state cut up and put together again"),
    Lesson("04", "Memory breakdown", "Where do sixteen bytes per parameter come from?", 40,
           "a memory meter; the five states of mixed-precision AdamW"),
    Lesson("05", "ZeRO stage 1", "Who needs the same Adam moments on every rank?", 45,
           "shards of any size; the step of stage 1, on four ranks, within a traffic budget"),
    Lesson("06", "ZeRO stage 2", "Why keep gradients that somebody else will use?", 45,
           "the reduction that sends a unit's gradients away the moment they are complete"),
    Lesson("07", "ZeRO stage 3", "Must every rank hold every parameter all the time?", 55,
           "a layer, forward and backward, whose weight no rank holds"),
    Lesson("08", "Communication", "What does it cost to move what nobody holds?", 60,
           "two rings out of sends and receives; the time of a step, and what sets its pace"),
    Lesson("09", "Offload", "What can wait in CPU memory or on a disk?", 60,
           "the search for the cheapest cut; a step whose optimizer is below the device; reads, "
           "updates and writes with room for two"),
    Lesson("10", "FSDP", "Which stage is FSDP really?", 60,
           "a model under fully_shard, gathered unit by unit; a comparison in numbers"),
    Lesson("11", "Common pitfalls", "Which rank is ill, and of what?", 55,
           "diagnoses of twelve faults on live ranks; a global norm, and a loop that ends on all "
           "ranks together"),
    Lesson("12", "Summary", "Which sentences of the summary would you sign?", 25,
           "the reductions for any number of ranks; the cheapest stage that fits"),
    Lesson("13", "Exercises", "Can you do it without being led?", 180,
           "the lecture's five exercises and ten more, with numbers of your own"),
)  # fmt: skip
LESSONS: dict[str, Lesson] = {lesson.number: lesson for lesson in _ROWS}


class CourseMap:
    """The lessons as a table, for a notebook and for a terminal; links where there is a lesson."""

    def __repr__(self) -> str:
        return "\n".join(
            f"{x.number} {x.name:23} {f'{x.minutes} min' if x.minutes else 'announced':>9}  "
            f"{x.question}" for x in LESSONS.values())  # fmt: skip

    def _repr_markdown_(self) -> str:
        head = "| lesson | the question | minutes | you build |\n|---|---|---|---|\n"
        return head + "\n".join(map(table_row, LESSONS.values()))


def table_row(lesson: Lesson, folder: str = "") -> str:
    """One row of the table of lessons, in Markdown; `folder` leads from the page to the lesson."""
    title = f"{lesson.number} {lesson.name}"
    link = f"[{title}]({folder}{lesson.stem}.ipynb)" if lesson.minutes else title
    return f"| {link} | {lesson.question} | {lesson.minutes or 'announced'} | {lesson.builds} |"
