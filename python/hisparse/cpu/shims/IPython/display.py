from hisparse.cpu.absent import Absent

HTML = Absent("IPython.display.HTML")
display = Absent("IPython.display.display")
