"""What a session does in a folder that several drivers share: :class:`fluid.session.joint.session.JointSession`."""
