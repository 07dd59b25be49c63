"""Every wrong thing that the tests need, in one folder: rings, steps of models, answers, schedules.

file                    what is wrong                                                   who reads it
sick_rings.py           rings with mistakes, which one kind of question sees            doctor/test_questions.py
odd_patients.py         rings that hang, crash, refuse, change their input              doctor/: most files
job.py                  a right training script, whose lines a test spoils              doctor/test_running_jobs.py
sick_models.py          steps of a whole model                                          doctor/test_whole_model.py
readers_schedules.py    schedules of readers of the puzzles                             pages/test_puzzles.py
tried_answers.py        answers to the exercises of all chapters                        pages/test_exercises.py
failing_ring.py         a rank that fails, and a command with a wrong result            basics/test_processes.py

The doctor's table (ring_doctor/catalogue.py) describes mistakes. What stands here is another ring with one of them, so
that the doctor does not only know its own drawing of it, or a mistake that the table does not hold. A mistake of one
function only stays in the test of that function.
"""
