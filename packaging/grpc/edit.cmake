# coracle_edit(<target> <source> <text> <replacement> ...): builds <target> with a copy of <source>, a
# path as in gRPC's CMakeLists.txt, in which each text is replaced. A text that is not there exactly
# once ends the build: another release of the library has other lines.
function(coracle_edit target source)
  get_target_property(_root ${target} SOURCE_DIR)
  get_target_property(_sources ${target} SOURCES)
  list(FIND _sources "${source}" _index)
  if(_index EQUAL -1)
    message(FATAL_ERROR "${target} has no source ${source}")
  endif()

  file(READ "${_root}/${source}" _content)
  coracle_replace(_content "${source}" ${ARGN})
  set(_copy "${CMAKE_BINARY_DIR}/first/${source}")
  file(WRITE "${_copy}" "${_content}")

  list(REMOVE_AT _sources ${_index})
  list(INSERT _sources ${_index} "${_copy}")
  set_target_properties(${target} PROPERTIES SOURCES "${_sources}")
endfunction()

# coracle_replace(<variable> <name> <text> <replacement> ...): replaces in the content of <variable>, that
# of the file <name>.
function(coracle_replace variable name)
  set(_content "${${variable}}")
  set(_pairs ${ARGN})
  while(_pairs)
    list(POP_FRONT _pairs _text _replacement)
    string(FIND "${_content}" "${_text}" _first)
    string(FIND "${_content}" "${_text}" _last REVERSE)
    if(_first EQUAL -1 OR NOT _first EQUAL _last)
      message(FATAL_ERROR "${name} does not have this text exactly once: ${_text}")
    endif()
    string(REPLACE "${_text}" "${_replacement}" _content "${_content}")
  endwhile()
  set(${variable} "${_content}" PARENT_SCOPE)
endfunction()
